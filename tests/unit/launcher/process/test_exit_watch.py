"""Times and order of process exits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ddpcheck.launcher.process.exit_watch import ExitWatch
from ddpcheck.launcher.process.process_table import descendants, process_start, read_process


@pytest.fixture(params=[True, False], ids=["pidfd", "polling"])
def watch(request: pytest.FixtureRequest) -> Iterator[ExitWatch]:
    watch = ExitWatch(use_pidfd=request.param)
    yield watch
    watch.close()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])


def wait_until_recorded(watch: ExitWatch, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(watch._exits) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_order_and_time_of_exits(watch: ExitWatch) -> None:
    processes = [sleeper() for _ in range(3)]
    for rank, process in enumerate(processes):
        assert watch.add(process.pid, rank, process_start(process.pid))
        assert watch.add(process.pid, rank)  # a second time changes nothing
    assert watch.poll() == []
    bounds = []
    for count, rank in enumerate((2, 0, 1)):
        killed = time.time()
        processes[rank].kill()  # a zombie counts as gone: nobody reaps it here
        wait_until_recorded(watch, count + 1)
        bounds.append((killed, time.time()))
    exits = watch.poll()
    assert [(rank, pid) for rank, pid, _ in exits] == [(rank, processes[rank].pid) for rank in (2, 0, 1)]
    assert all(first <= when <= last for (_, _, when), (first, last) in zip(exits, bounds, strict=True))
    for process in processes:
        process.wait()
    assert watch.poll() == []


def test_exited_before_it_was_added(watch: ExitWatch) -> None:
    process = sleeper()
    process.kill()
    process.wait()
    assert not watch.add(process.pid, 5)
    assert [(rank, pid) for rank, pid, _ in watch.poll()] == [(5, process.pid)]
    assert watch.found_gone == {process.pid}


def test_reused_id_is_another_process(watch: ExitWatch) -> None:
    assert not watch.add(os.getpid(), 1, (process_start(os.getpid()) or 0) - 1)
    assert [(rank, pid) for rank, pid, _ in watch.poll()] == [(1, os.getpid())]


def test_closing_twice_and_adding_after() -> None:
    watch = ExitWatch()
    watch.add(os.getpid(), 0)
    watch.close()
    watch.close()
    assert watch.add(os.getpid(), 1)
    assert watch.poll() == []


def test_process_table() -> None:
    process = sleeper()
    try:
        row = read_process(process.pid)
        assert row is not None
        assert (row.pid, row.parent, row.is_gone) == (process.pid, os.getpid(), False)
        assert process.pid in {child.pid for child in descendants(os.getpid())}
        assert process.pid not in {child.pid for child in descendants(os.getpid(), [process.pid])}
    finally:
        process.kill()
        process.wait()
    assert read_process(process.pid) is None
    assert process_start(process.pid) is None
