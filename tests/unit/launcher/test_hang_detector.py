"""The hang detector with a fake clock: when it requests stacks, and when it reports a hang."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.agent.shm_exchange import Heartbeat, create_exchange
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import Config
from ddpcheck.launcher import hang_detector
from ddpcheck.launcher.hang_detector import HangDetector
from ddpcheck.launcher.process.process_table import Activity, process_start
from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.records.kinds.rank import FaultRecord, StackRecord
from ddpcheck.records.node_log import NodeLog
from ddpcheck.records.reasons import NoHangWatch
from ddpcheck.records.registry import to_line
from tests.helpers.run_builder import RunBuilder
from tests.unit.analysis.hang.test_stacks import BARRIER, MAIN, USER

TIMEOUT = 100.0
RESTING = Activity(1, 1, "futex_do_wait", False, 1, 1, 1)
ELSEWHERE = [["/home/me/train.py", 42, "evaluate"], USER, MAIN]


class Watched:
    """A job of two ranks, which are sleeping processes, with a fake clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, world_size: int = 2) -> None:
        self.now = 0.0
        self.folder = folder / "run"
        self.exchange_file = folder / "exchange"
        create_exchange(self.exchange_file)
        self.sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        self.build = RunBuilder(self.folder, world_size)
        self.beats = [1, 1]
        self.activities = [RESTING, RESTING]
        self.standings: list[list[Any] | None] = [BARRIER, BARRIER]
        self.questions: list[int] = []
        for rank, sleeper in enumerate(self.sleepers):
            header: Any = self.build.records[rank][0]
            self.build.records[rank][0] = replace(
                header, host="here", pid=sleeper.pid, ticks=process_start(sleeper.pid), backend="gloo"
            )
        for rank in range(2, world_size):
            del self.build.records[rank]
        self.build.save()
        monkeypatch.setattr(hang_detector, "heartbeats", lambda path: self.heartbeats())
        monkeypatch.setattr(hang_detector, "request_stacks", lambda path, number: self.asked(number))
        monkeypatch.setattr(
            hang_detector, "read_activity", lambda pid, *_: self.activities[self.rank_of(pid)]
        )
        config = Config(
            run_dir=str(self.folder),
            run_id="test",
            exchange_file=str(self.exchange_file),
            hang_timeout=TIMEOUT,
        )
        self.run = RunReader(self.folder)
        self.log = NodeLog(self.folder, host="here")
        self.watch = HangDetector(self.run, self.log, config, clock=lambda: self.now)

    def rank_of(self, pid: int) -> int:
        return [sleeper.pid for sleeper in self.sleepers].index(pid)

    def heartbeats(self) -> dict[tuple[int, int], Heartbeat]:
        return {
            (rank, sleeper.pid): Heartbeat(self.beats[rank]) for rank, sleeper in enumerate(self.sleepers)
        }

    def asked(self, number: int) -> None:
        self.questions.append(number)
        for rank, frames in enumerate(self.standings):
            if frames is not None:
                self.append(rank, StackRecord(number, self.now, frames))

    def append(self, rank: int, record: Any) -> None:
        with (self.folder / f"rank-{rank:05d}.jsonl").open("ab") as file:
            file.write(to_line(record))

    def go(self, seconds: float, step: float = 1.0) -> StopRequest | None:
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.run.poll()
            request = self.watch.tick()
            if request is not None:
                return request
        return None

    def logged(self, kind: str) -> list[dict[str, Any]]:
        path = self.log.path
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(tmp_path, monkeypatch)
    yield watched
    for sleeper in watched.sleepers:
        sleeper.kill()
        sleeper.wait()


def test_no_request_while_the_job_makes_progress(job: Watched) -> None:
    for _ in range(20):
        assert job.go(TIMEOUT / 4) is None
        job.beats[1] += 1
    assert job.questions == []


def test_waiting_ranks_hang_after_the_timeout_and_not_before(job: Watched) -> None:
    assert job.go(TIMEOUT) is None
    assert job.go(5.0) is not None
    assert job.questions == [1, 2]
    [hang] = job.logged("hang")
    assert hang["seconds"] == pytest.approx(TIMEOUT, abs=5)
    assert [seen["state"] for seen in hang["ranks"].values()] == ["waits", "waits"]
    assert job.go(3 * TIMEOUT) is None
    assert len(job.logged("hang")) == 1


def test_a_busy_rank_is_logged_as_slow_once(job: Watched) -> None:
    job.standings[1] = ELSEWHERE
    for _ in range(10):
        job.activities[1] = replace(RESTING, thread_ticks=job.activities[1].thread_ticks + 5000)
        assert job.go(TIMEOUT / 2) is None
    [slow] = job.logged("slow")
    assert slow["ranks"] == {"0": "waits", "1": "busy"}
    # Then it reaches the barrier at which the other waits, and both hang there.
    job.standings[1] = BARRIER
    assert job.go(2 * TIMEOUT) is not None


def test_a_rank_without_an_answer_is_sampled_after_the_answer_time(job: Watched) -> None:
    job.standings[1] = None
    assert job.go(2 * TIMEOUT) is not None
    [hang] = job.logged("hang")
    assert hang["ranks"]["1"] == {"state": "still", "sleeps_in": "futex_do_wait", "answered": False}


def test_a_rank_with_a_failed_probe_is_not_classified(job: Watched) -> None:
    job.standings[1] = None
    job.append(1, FaultRecord("standing", "listen", "RuntimeError: x", "", 1))
    assert job.go(5 * TIMEOUT) is None


def test_one_rank_ended_while_the_other_waits(job: Watched) -> None:
    assert job.go(TIMEOUT / 2) is None
    job.sleepers[1].kill()
    job.sleepers[1].wait()
    # Its end counts as progress.
    assert job.go(TIMEOUT - 5) is None
    assert job.go(TIMEOUT) is not None
    assert job.logged("hang")[0]["ranks"]["1"]["state"] == "left"


def test_no_request_after_the_job_has_ended(job: Watched) -> None:
    for sleeper in job.sleepers:
        sleeper.kill()
        sleeper.wait()
    assert job.go(5 * TIMEOUT) is None
    assert job.questions == []


def test_time_in_which_a_rank_is_stopped_does_not_count(job: Watched) -> None:
    os.kill(job.sleepers[0].pid, 19)
    assert job.go(3 * TIMEOUT) is None
    assert job.questions == []
    os.kill(job.sleepers[0].pid, 18)
    assert job.go(TIMEOUT - 5) is None
    assert job.go(20) is not None


def test_time_in_which_the_launcher_was_stopped_does_not_count(job: Watched) -> None:
    assert job.go(TIMEOUT - 10) is None
    job.now += 1000
    assert job.go(TIMEOUT - 5) is None
    assert job.go(20) is not None


def test_ranks_of_other_nodes_need_their_own_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of another node may be busy until its launcher logs it as stuck."""
    job = Watched(tmp_path, monkeypatch, world_size=3)
    try:
        assert job.go(3 * TIMEOUT) is None
        assert [entry["ranks"] for entry in job.logged("standstill")] == [[0, 1]]
        other = NodeLog(job.folder, host="there")
        other.write("standstill", session="another", pid=7, ranks=[2])
        assert job.go(5) is None
        other.write("standstill", session=job.build.session, pid=7, ranks=[2])
        other.write("standstill", session=job.build.session, pid=7, ranks=[])
        assert job.go(5) is None
        other.write("standstill", session=job.build.session, pid=7, ranks=[2])
        assert job.go(5) is not None
        other.close()
    finally:
        for sleeper in job.sleepers:
            sleeper.kill()
            sleeper.wait()


def test_progress_withdraws_stuck_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Watched(tmp_path, monkeypatch, world_size=3)
    try:
        assert job.go(2 * TIMEOUT) is None
        job.beats[0] += 1
        assert job.go(5) is None
        assert [entry["ranks"] for entry in job.logged("standstill")] == [[0, 1], []]
    finally:
        for sleeper in job.sleepers:
            sleeper.kill()
            sleeper.wait()


def test_ranks_whose_processes_are_hidden_are_logged_while_they_live(tmp_path: Path, job: Watched) -> None:
    for rank in range(2):
        header: Any = job.build.records[rank][0]
        job.build.records[rank][0] = replace(header, pid_namespace="pid:[1]")
    job.build.save()
    job.go(3)
    # They may as well be dead.
    assert job.logged("no_hang_watch") == []
    job.beats[1] += 1
    assert job.go(3 * TIMEOUT) is None
    [record] = job.logged("no_hang_watch")
    assert (record["why"], record["ranks"]) == (NoHangWatch.HIDDEN.value, [0, 1])


def test_ranks_that_wait_for_no_other_rank_hang_if_those_of_another_launcher_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under srun and mpirun, each rank has a launcher of its own: none of them sees both sides of a hang."""
    job = Watched(tmp_path, monkeypatch, world_size=3)
    try:
        job.standings = [ELSEWHERE, ELSEWHERE]
        assert job.go(3 * TIMEOUT) is None
        [record] = job.logged("standstill")
        assert (record["ranks"], record["waiting"]) == ([0, 1], [])
        other = NodeLog(job.folder, host="there")
        other.write("standstill", session=job.build.session, pid=7, ranks=[2], waiting=[])
        assert job.go(5) is None
        other.write("standstill", session=job.build.session, pid=7, ranks=[2], waiting=[2])
        assert job.go(5) is not None
        other.close()
    finally:
        for sleeper in job.sleepers:
            sleeper.kill()
            sleeper.wait()
