"""The state of a running job, from records that still grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.analysis.live.tracker import LATEST, LiveState, LiveTracker
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.memory import MemoryRecord
from ddpcheck.records.kinds.timing import ClockRecord
from tests.helpers.run_builder import RunBuilder

MB = 1_000_000


def clocks(total: int, wait: int, steps: int = 40) -> ClockRecord:
    part = (total - wait) // 4
    parts = {name: [part] * steps for name in ("data", "forward", "backward", "optimizer")}
    rest = {"watching": [0] * steps, "queued": [0] * steps}
    return ClockRecord(step=0, total=[total] * steps, wait=[wait] * steps, **parts, **rest)


def tracked(folder: Path) -> tuple[RunReader, LiveTracker]:
    run = RunReader(folder)
    return run, LiveTracker(run, "train", began=100.0)


def state_of(builder: RunBuilder, now: float = 103.0) -> LiveState:
    run, tracker = tracked(builder.save())
    run.poll()
    return tracker.state(now)


def test_the_state_before_the_first_rank(tmp_path: Path) -> None:
    _, tracker = tracked(tmp_path)
    state = tracker.state(142.0)
    assert (state.ranks, state.steps, state.fewest_steps, state.step_time) == ((), 0, 0, None)
    assert state.seconds == 42.0


def test_a_healthy_run(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 4).wrap().optimizer().train(7)
    for rank in builder.ranks:
        # Rank 2 is late: it waits for no other rank.
        builder.add(rank, clocks(10_000, 500 if rank == 2 else 2500))
        builder.add(rank, MemoryRecord(6, host=(200 + rank) * MB, high=300 * MB))
    state = state_of(builder)
    assert (state.world_size, state.steps, state.fewest_steps) == (4, 7, 7)
    assert (state.agreement.compared, state.agreement.diverged) == (7, False)
    assert state.step_time is not None
    assert (state.step_time.step_us, state.step_time.latest_rank) == (10_000, 2)
    assert state.step_time.exposed == pytest.approx(0.05)
    assert state.step_time.late == pytest.approx(0.15)
    assert state.step_time.recent_us == (10_000,) * LATEST
    assert [rank.memory for rank in state.ranks] == [200 * MB, 201 * MB, 202 * MB, 203 * MB]
    assert {rank.peak_memory for rank in state.ranks} == {300 * MB}
    assert {rank.status for rank in state.ranks} == {"running"}
    assert state.finding is None


def test_diverged_ranks_have_the_finding_of_a_rule(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 4).wrap().optimizer().train(3)
    state = state_of(builder.train(2, 3, {1: ["body.bias"]}))
    assert state.agreement.diverged
    assert (state.agreement.step, state.agreement.stage, state.agreement.outliers) == (3, "params", (1,))
    assert state.finding is not None
    assert (state.finding.code, state.finding.step, state.finding.ranks) == ("DDP201", 3, (1,))


def test_the_first_of_several_events_counts(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 2).wrap(outliers={1: ["body.bias"]}).optimizer()
    state = state_of(builder.step(0, outliers={1: ["body.bias"]}))
    assert (state.agreement.step, state.agreement.stage) == (None, "init.after")
    assert state.finding is not None
    assert state.finding.code == "DDP101"


def test_progress_depends_on_ranks_not_on_time(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 2).wrap().optimizer().train(3)
    run, tracker = tracked(builder.save())
    run.poll()
    assert tracker.state(110.0).quiet_seconds == 0.0
    assert not tracker.state(119.0).stalled
    assert tracker.state(125.0).quiet_seconds == 15.0
    assert tracker.state(125.0).stalled
    builder.step(3).save()
    run.poll()
    assert tracker.state(126.0).quiet_seconds == 0.0


def test_a_rank_that_is_behind_and_one_that_raised(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 3).wrap().optimizer().train(4)
    builder.snapshot(Stage.PARAMS, 4, optimizer=0, ranks=[0, 1])
    builder.end([1], reason="raised", error="ValueError: no")
    state = state_of(builder)
    assert [(rank.steps, rank.status) for rank in state.ranks] == [
        (5, "running"),
        (5, "raised"),
        (4, "running"),
    ]
    assert (state.steps, state.fewest_steps) == (5, 4)
    assert state.ranks[1].error == "ValueError: no"


def test_a_restart_replaces_the_first_attempt(tmp_path: Path) -> None:
    RunBuilder(tmp_path, 2).wrap().optimizer().train(3, outliers={1: ["body.bias"]}).save()
    again = RunBuilder(tmp_path, 2, session="a2").wrap().optimizer().train(2)
    for records in again.records.values():
        object.__setattr__(records[0], "time", 2000.0)
    state = state_of(again)
    assert (state.attempt, state.steps, state.agreement.diverged) == (1, 2, False)


def test_a_pause_is_measured_by_the_steps(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 2).wrap().optimizer().train(3)
    for rank in builder.ranks:
        builder.add(rank, clocks(6_000_000, 0))
    run, tracker = tracked(builder.save())
    run.poll()
    tracker.state(110.0)
    assert not tracker.state(135.0).stalled
    assert tracker.state(141.0).stalled
