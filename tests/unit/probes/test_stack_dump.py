"""The stack dump probe: heartbeats, and a stack from another thread than the training thread."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpcheck.agent.shm_exchange import ShmExchange, create_exchange, heartbeats, request_stacks
from ddpcheck.guard import GUARD
from ddpcheck.probes import stack_dump
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.stack_dump import StackDumpProbe, frames_of
from ddpcheck.records.kinds.rank import StackRecord
from tests.helpers.fake_context import FakeContext, Job


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "board"
    create_exchange(path)
    yield path
    # Threads of these tests end with their probes.
    GUARD.entry_points.pop("standing.listen", None)
    GUARD.entry_points.pop("standing.begin", None)


def scene_on(path: Path, **config: float) -> FakeContext:
    return FakeContext(exchange=ShmExchange(path, 0), hang_timeout=config.get("hang_timeout", 1.0))


def answer(context: FakeContext, count: int = 1) -> StackRecord:
    deadline = time.monotonic() + 60
    while len(context.of(StackRecord)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return context.of(StackRecord)[-1]


def test_every_moment_of_training_is_a_sign(exchange: Path) -> None:
    context = scene_on(exchange)
    module = nn.Linear(2, 2)
    job = Job(module, context, [StackDumpProbe]).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    beats = [heartbeats(exchange)[0, os.getpid()].beats]
    for _ in range(3):
        job.train(optimizer)
        beats.append(heartbeats(exchange)[0, os.getpid()].beats)
    assert beats == sorted(set(beats))


def test_a_question_is_answered_once_from_beside_a_thread_that_waits(exchange: Path) -> None:
    context = scene_on(exchange)
    module = nn.Linear(2, 2)
    job = Job(module, context, [StackDumpProbe]).wrapped()
    job.train(torch.optim.SGD(module.parameters(), lr=0.1), steps=2)
    request_stacks(exchange, 1)
    record = answer(context)
    assert (record.look, record.step, record.moment, record.left) == (1, 2, "after_step", False)
    assert record.thread == threading.get_native_id()
    here = [f"{Path(file).name} {function}" for file, _, function in record.frames]
    assert "test_stack_dump.py answer" in here
    # The innermost first, and places only.
    assert here.index("test_stack_dump.py answer") < here.index(
        "test_stack_dump.py test_a_question_is_answered_once_from_beside_a_thread_that_waits"
    )
    assert all(isinstance(line, int) for _, line, _ in record.frames)
    time.sleep(0.5)
    assert len(context.of(StackRecord)) == 1
    job.context.emit(Probe.before_exit)
    request_stacks(exchange, 2)
    assert answer(context, 2).left


def test_own_threads_are_introduced(exchange: Path) -> None:
    context = scene_on(exchange)
    context.probes = [StackDumpProbe(context)]
    deadline = time.monotonic() + 60
    while not heartbeats(exchange)[0, os.getpid()].own_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    own = heartbeats(exchange)[0, os.getpid()].own_threads
    assert own
    assert threading.get_native_id() not in own


@pytest.mark.parametrize("config", [{"hang_timeout": 0.0}, {}])
def test_without_a_board_or_a_timeout_there_is_no_thread(exchange: Path, config: dict[str, float]) -> None:
    before = threading.active_count()
    context = scene_on(exchange, **config) if config else FakeContext()
    job = Job(nn.Linear(2, 2), context, [StackDumpProbe])
    job.train(torch.optim.SGD(job.module.parameters(), lr=0.1))
    assert threading.active_count() == before
    assert context.of(StackRecord) == []


def test_the_thread_of_a_session_that_is_over_ends(exchange: Path) -> None:
    context = scene_on(exchange)
    probe = StackDumpProbe(context)
    [thread] = [
        t for t in threading.enumerate() if isinstance(t, stack_dump._Listener) and t._probe() is probe
    ]
    del probe
    GUARD.entry_points.pop("standing.listen")
    GUARD.entry_points.pop("standing.begin")
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()  # at the very moment the thread itself may hold it
        thread.join(0.1)
    assert not thread.is_alive()


def test_the_thread_ends_with_its_session_even_if_the_probe_is_alive(exchange: Path) -> None:
    """A module of the previous group may stay alive, and with it everything that tracked it."""
    context = scene_on(exchange)
    probe = StackDumpProbe(context)
    [thread] = [
        t for t in threading.enumerate() if isinstance(t, stack_dump._Listener) and t._probe() is probe
    ]
    context.over = True
    thread.join(60)
    assert not thread.is_alive()


def test_a_system_without_threads_costs_this_probe_only(
    exchange: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stack_dump._Listener, "start", refuse)
    monkeypatch.setattr(GUARD, "off", set())
    monkeypatch.setattr(GUARD, "_unreported", [])
    context = scene_on(exchange)
    context.probes = [StackDumpProbe(context)]
    assert GUARD.off == {"standing"}


def test_a_deep_stack_is_truncated_in_the_middle() -> None:
    def dive(depth: int) -> list[list[object]]:
        return frames_of(threading.get_ident()) if depth == 0 else dive(depth - 1)

    frames = dive(100)
    assert len(frames) == stack_dump.MAX_INNER + stack_dump.MAX_OUTER
    assert frames[1][2] == "dive"
    assert frames[-1][2] != "dive"


def test_credentials_in_a_path_are_masked() -> None:
    scope: dict[str, object] = {"frames_of": frames_of, "threading": threading}
    source = "def look():\n    return frames_of(threading.get_ident())\n"
    exec(compile(source, "/data/token=ghp_0123456789abcdefghijsecretmark/train.py", "exec"), scope)
    look = scope["look"]
    assert callable(look)
    assert "secretmark" not in str(look())
