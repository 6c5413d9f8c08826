"""DDP214: ranks accumulate gradients differently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.rank import FaultRecord
from ddpcheck.records.kinds.state import GradientStartRecord
from tests.helpers.run_builder import RunBuilder


def run(folder: Path, world_size: int = 3, steps: int = 8) -> RunBuilder:
    return RunBuilder(folder, world_size).wrap().optimizer().train(steps)


def start(build: RunBuilder, rank: int, step: int, value: str) -> RunBuilder:
    build.add(rank, GradientStartRecord(0, step, value, "/home/me/train.py:30"))
    return build


def test_old_gradients_on_one_rank(tmp_path: Path) -> None:
    finding = start(run(tmp_path), 1, 3, "old").end().only("DDP214")
    assert (finding.severity.value, finding.step, finding.ranks) == ("error", 3, (1,))
    assert finding.evidence["steps"] == [3, None]
    assert finding.evidence["backward_at"] == "/home/me/train.py:30"


def test_for_two_steps(tmp_path: Path) -> None:
    build = start(run(tmp_path, 2), 0, 3, "partly_old")
    finding = start(build, 0, 5, "cleared").end().only("DDP214")
    assert (finding.step, finding.ranks, finding.evidence["steps"]) == (3, (0, 1), [3, 4])


def test_all_ranks_keep_their_gradients(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        start(build, rank, 1, "old")
    assert build.end().findings() == []


def test_a_rank_that_steps_nothing_or_was_not_observed(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    for step in range(6):
        build.step(step, ranks=[0])
    assert start(build, 0, 2, "old").end().findings("DDP214") == []
    build = start(run(tmp_path / "fault"), 1, 3, "old")
    for rank in (0, 2):
        build.add(rank, FaultRecord("gradient_start", "backward_called", "ValueError: no", "", 1))
    assert build.end().findings("DDP214") == []


def applied(build: RunBuilder, counts: Mapping[int, list[int]], last: str = "synced") -> RunBuilder:
    for step in range(8):
        on = {rank: {"unsynced": of_rank[step % len(of_rank)] - 1} for rank, of_rank in counts.items()}
        build.apply(step, on=on, last=last)
    return build


def test_another_number_of_backwards(tmp_path: Path) -> None:
    finding = applied(run(tmp_path), {0: [4], 1: [4], 2: [2]}).end().only("DDP214")
    assert (finding.severity.value, finding.step, finding.ranks) == ("warning", 0, (2,))
    assert finding.evidence["backwards"] == {"ranks 0-1": "4", "rank 2": "2"}


def test_numbers_that_vary_are_a_note(tmp_path: Path) -> None:
    (finding,) = applied(run(tmp_path), {0: [3, 1, 2], 1: [1, 2, 3], 2: [2, 3, 1]}).end().findings("DDP214")
    assert finding.severity.value == "note"


def test_equal_numbers_that_vary(tmp_path: Path) -> None:
    assert applied(run(tmp_path), {rank: [3, 1, 2] for rank in range(3)}).end().findings() == []


def test_uneven_inputs_under_join(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        build.add(rank, JoinRecord(0, 0))
    assert applied(build, {0: [4], 1: [4], 2: [2]}).end().findings("DDP214") == []


def test_backwards_that_ddp_did_not_reduce_have_other_findings(tmp_path: Path) -> None:
    build = applied(run(tmp_path), {0: [4], 1: [4], 2: [2]}, last="unsynced")
    assert build.end().findings("DDP214") == []
