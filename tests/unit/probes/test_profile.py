"""The profiler session: what it records, when it stops for the user's profiler, and that it cleans up."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.agent.rank_context import SPAN_NAME, in_profiler_span
from ddpcheck.config import Config
from ddpcheck.patches import Patches
from ddpcheck.probes.gradients import GradientProbe
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.process.profiler_conflict import PROFILERS
from ddpcheck.probes.profile import ProfileProbe, _limits
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.timing import ReadyRecord, TraceRecord
from tests.helpers.fake_context import FakeContext, Job


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    patches = Patches()
    PROFILERS.user_profiles = False
    PROFILERS.watch_switches(patches)
    yield
    patches.remove()
    PROFILERS.user_profiles, PROFILERS.on_conflict, PROFILERS.on_export = False, None, None


class Training:
    """A module in training with the probe, one real backward per step."""

    def __init__(self, folder: Path, window: str = "2:4") -> None:
        self.context = FakeContext(folder, profile=window)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.job = Job(module, self.context, [ProfileProbe, GradientProbe]).wrapped()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.job.forward(torch.ones(2, 4)).sum().backward()
            self.job.step(self.optimizer)
        return self

    @property
    def traces(self) -> list[TraceRecord]:
        return self.context.of(TraceRecord)

    def end(self) -> None:
        self.context.emit(Probe.before_exit)


def marks(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")]


def test_only_complete_steps_are_recorded(tmp_path: Path) -> None:
    training = Training(tmp_path).steps(6)
    [record] = training.traces
    assert (record.first, record.end, record.own) == (2, 4, True)
    assert marks(tmp_path / record.file) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert [(each.step, each.number) for each in training.context.of(ReadyRecord)] == [(2, 3), (3, 4)]
    assert not torch.autograd._profiler_enabled()


def test_the_file_has_the_name_for_torch_tb_profiler_and_private_permissions(tmp_path: Path) -> None:
    [record] = Training(tmp_path).steps(4).traces
    host, pid, rank = Path(record.file).name.split(".")[0].rsplit("_", 2)
    assert (host, pid, rank) == (os.uname().nodename, str(os.getpid()), "rank0")
    assert record.file.startswith("traces/")
    assert record.file.endswith(".pt.trace.json.gz")
    assert (tmp_path / record.file).stat().st_mode & 0o777 == 0o600


def test_a_window_from_the_first_step_begins_with_its_forward(tmp_path: Path) -> None:
    [record] = Training(tmp_path, "0:1").steps(3).traces
    assert (record.first, record.end) == (0, 1)
    assert marks(tmp_path / record.file) == ["ProfilerStep#0"]


def test_complete_steps_are_kept_if_the_job_ends_early(tmp_path: Path) -> None:
    training = Training(tmp_path, "2:9").steps(4)
    assert training.traces == []
    training.end()
    [record] = training.traces
    assert (record.first, record.end) == (2, 4)


def test_an_unfinished_step_is_not_kept(tmp_path: Path) -> None:
    training = Training(tmp_path, "2:9").steps(2)
    training.end()
    assert training.traces == []
    assert not torch.autograd._profiler_enabled()


def test_two_optimizers_share_a_step(tmp_path: Path) -> None:
    training = Training(tmp_path, "1:2")
    first, second = training.job.module
    pair = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (first, second)]
    for _ in range(4):
        training.job.forward(torch.ones(2, 4)).sum().backward()
        for optimizer in pair:
            training.job.step(optimizer)
    [record] = training.traces
    assert (record.first, record.end) == (1, 2)


def test_when_gradients_were_ready(tmp_path: Path) -> None:
    first, _ = Training(tmp_path).steps(5).context.of(ReadyRecord)
    assert sorted(first.order) == [0, 1, 2, 3]
    # The gradients of the last layer come first.
    assert set(first.order[:2]) == {2, 3}
    assert first.after_us[0] == 0
    assert first.after_us == sorted(first.after_us)
    assert first.done_us >= first.after_us[-1]


def test_gradients_are_not_sketched_meanwhile(tmp_path: Path) -> None:
    training = Training(tmp_path).steps(6)
    training.end()
    assert [each.step for each in training.context.of(BackwardRecord) if each.local] == [0, 1, 4, 5]


def test_a_profiler_of_the_user_that_runs_keeps_ours_out(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with torch.profiler.profile() as mine:
        training.steps(6)
    mine.export_chrome_trace(str(tmp_path / "mine.json"))
    assert training.traces == [
        TraceRecord(file="", own=False),
        TraceRecord(file=str(tmp_path / "mine.json"), own=False),
    ]
    assert len(mine.events()) > 0
    assert training.context.of(ReadyRecord) == []


def test_one_that_starts_within_the_window_ends_it(tmp_path: Path) -> None:
    training = Training(tmp_path, "2:9").steps(4)
    assert torch.autograd._profiler_enabled()
    with torch.profiler.profile() as mine:
        training.steps(2)
    names = {event.name for event in mine.events()}
    assert "aten::linear" in names
    training.steps(3)
    assert training.traces == [TraceRecord(file="", own=False)]
    assert not torch.autograd._profiler_enabled()


def test_one_that_is_only_prepared_keeps_ours_out_too(tmp_path: Path) -> None:
    training = Training(tmp_path).steps(1)
    mine = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=4, active=2, repeat=1))
    mine.start()
    for _ in range(6):
        training.steps(1)
        mine.step()
    mine.stop()
    assert training.traces == [TraceRecord(file="", own=False)]


def test_the_environment_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    Training(tmp_path).steps(6)
    assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "3")
    Training(tmp_path).steps(6)
    assert os.environ["KINETO_LOG_LEVEL"] == "3"


def test_it_is_wanted_only_where_a_window_is() -> None:
    assert not ProfileProbe.wanted(Config(run_dir="", run_id=""))
    assert ProfileProbe.wanted(Config(run_dir="", run_id="", profile="5:8"))


def test_our_own_work_has_a_span_in_traces() -> None:
    calls: list[Any] = []
    entry = in_profiler_span(calls.append)
    entry("before")
    with torch.profiler.profile() as profiler:
        entry("within")
    assert calls == ["before", "within"]
    assert [event.name for event in profiler.events() if event.name == SPAN_NAME] == [SPAN_NAME]


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path, "2:9").steps(3)
    child = os.fork()
    if child == 0:
        PROFILERS.forked()
        before = _resident_pages()
        value = torch.ones(2)
        for _ in range(20_000):
            value = value + 1
        # Recorded, it would be some 50 MB.
        os._exit(0 if _resident_pages() - before < 4000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.steps(1).end()
    [record] = training.traces
    assert marks(tmp_path / record.file)[:2] == ["ProfilerStep#2", "ProfilerStep#3"]


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


class _Buckets:
    """The options that DDP keeps as attributes."""

    def __init__(self, cap: int, default: bool, listed: list[int]) -> None:
        self.bucket_bytes_cap, self.bucket_bytes_cap_default = cap, default
        self.bucket_bytes_cap_list = listed


def test_limits_of_buckets() -> None:
    assert _limits(_Buckets(25 << 20, True, [])) == [1 << 20, 25 << 20]
    assert _limits(_Buckets(8 << 20, False, [])) == [8 << 20]
    assert _limits(_Buckets(8 << 20, False, [1 << 20, 8 << 20])) == [1 << 20, 8 << 20]
