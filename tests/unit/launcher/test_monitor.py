"""A running job is monitored through its records and processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import Config
from ddpcheck.launcher import monitor as module
from ddpcheck.launcher.monitor import ExitWatch, RunMonitor
from ddpcheck.launcher.process.process_table import descendants, process_start, read_process
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.node_log import NodeLog
from tests.helpers.run_builder import RunBuilder


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


OUTLIERS = {1: ["body.bias"]}


def follower(folder: Path, fail_fast: bool) -> RunMonitor:
    config = Config(run_dir=str(folder), run_id="test", fail_fast=fail_fast)
    return RunMonitor(RunReader(folder), NodeLog(folder), config)


@pytest.mark.parametrize("fail_fast", [False, True])
def test_only_fail_fast_stops_a_job_that_diverges(tmp_path: Path, fail_fast: bool) -> None:
    builder = RunBuilder(tmp_path, 2).wrap().optimizer().train(3).step(3, outliers=OUTLIERS)
    builder.save()
    follow = follower(tmp_path, fail_fast)
    # The parameters may still be made equal before they are used.
    assert follow.tick() is None
    follow.close()
    builder.snapshot(Stage.USED, 3, outliers=OUTLIERS, optimizer=0).save()
    follow = follower(tmp_path, fail_fast)
    assert (follow.tick() is not None) == fail_fast
    follow.close()


def test_a_job_without_findings_is_not_stopped(tmp_path: Path) -> None:
    RunBuilder(tmp_path, 2).wrap().optimizer().train(3).save()
    follow = follower(tmp_path, fail_fast=True)
    assert follow.tick() is None
    follow.close()


def test_after_an_error_no_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = []

    def stumble(run: RunReader, seconds: float) -> bool:
        polls.append(run)
        raise KeyError("unexpected")

    monkeypatch.setattr(RunReader, "poll", stumble)
    follow = follower(tmp_path, fail_fast=False)
    with pytest.raises(KeyError):
        follow.tick()
    assert follow.tick() is None
    assert follow.failed
    assert len(polls) == 1
    follow.close()


def polled(folder: Path, host: str) -> RunReader:
    run = RunReader(folder, host)
    run.poll()
    return run


@pytest.mark.parametrize(("world_size", "followed"), [(8, 8), (128, 0)])
def test_in_a_large_job_each_launcher_reads_its_own_host(
    tmp_path: Path, world_size: int, followed: int
) -> None:
    RunBuilder(tmp_path, world_size).wrap().optimizer().train(3).end().save()
    run = polled(tmp_path, "elsewhere")
    (attempt,) = run.attempts.values()
    assert len(attempt.ranks) == world_size  # that they are there is known
    assert sum(attempt.steps(rank) == 3 for rank in attempt.ranks) == followed
    run.finish()
    assert {attempt.steps(rank) for rank in attempt.ranks} == {3}


def test_the_launcher_of_rank_0_reads_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_POLL_SECONDS", 60.0)
    RunBuilder(tmp_path, 128).wrap().optimizer().train(3).save()
    run = RunReader(tmp_path, "somewhere")
    host = next(iter(polled(tmp_path, "").attempts.values())).ranks[0].header.host
    follow = RunMonitor(run, NodeLog(tmp_path, host), Config(run_dir=str(tmp_path), run_id="test"))
    follow.tick()
    follow.tick()
    follow.close()
    (attempt,) = run.attempts.values()
    assert {attempt.steps(rank) for rank in attempt.ranks} == {3}


def test_a_slow_read_continues_at_the_next_tick(tmp_path: Path) -> None:
    RunBuilder(tmp_path, 4).wrap().optimizer().train(30).end().save()
    run = RunReader(tmp_path)
    assert not run.poll(seconds=0.0)
    assert run.poll()


def test_an_error_in_the_view_only_disables_the_view(tmp_path: Path) -> None:
    RunBuilder(tmp_path, 2).wrap().optimizer().train(3).train(2, 3, OUTLIERS).save()
    turns = []

    class Broken:
        def tick(self) -> None:
            turns.append(1)
            raise ValueError("no")

    config = Config(run_dir=str(tmp_path), run_id="test", fail_fast=True)
    follow = RunMonitor(RunReader(tmp_path), NodeLog(tmp_path), config, view=Broken())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no"):
        follow.tick()
    assert follow.tick() is not None
    assert len(turns) == 1
    follow.close()


class Turns:
    """A monitor with a fake clock that counts reads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, fail_fast: bool = False) -> None:
        self.now = 100.0
        self.polls = 0

        def poll(run: RunReader, seconds: float) -> bool:
            self.polls += 1
            return False

        monkeypatch.setattr(RunReader, "poll", poll)
        # The process of the tests may have children that use torch; a note on them would be a new file.
        monkeypatch.setattr("ddpcheck.launcher.unwatched.descendants", lambda pid: [])
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.follow = follower(folder, fail_fast)

    def reads_in(self, seconds: float) -> int:
        before = self.polls
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.follow.tick()
        return self.polls - before


def test_without_a_view_records_are_read_once_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path, monkeypatch)
    turns.reads_in(module.NEW_FILE_SECONDS + 1)
    assert 9 <= turns.reads_in(10) <= 10
    turns.follow.close()


def test_a_new_file_is_read_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(tmp_path, monkeypatch)
    turns.reads_in(module.NEW_FILE_SECONDS + 1.5)
    (tmp_path / "rank-00000.jsonl").touch()
    assert turns.reads_in(1) == 10
    turns.follow.close()


def test_with_fail_fast_records_are_read_at_every_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path, monkeypatch, fail_fast=True)
    turns.reads_in(module.NEW_FILE_SECONDS + 1)
    assert turns.reads_in(2) == 20
    turns.follow.close()


def test_a_removed_run_folder_does_not_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    turns = Turns(folder, monkeypatch)
    turns.reads_in(module.NEW_FILE_SECONDS + 1)
    shutil.rmtree(folder)
    assert turns.reads_in(3) == 3
