"""DDP207: ranks took a different number of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.modules import JoinRecord, OptimizerRecord
from tests.helpers.run_builder import RunBuilder

OUTLIERS = {1: ["body.bias"]}


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (4, (1,))])
def test_one_rank_stepped_less(tmp_path: Path, world_size: int, outliers: tuple[int, ...]) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().optimizer().train(3)
    finding = build.step(3, ranks=[r for r in build.ranks if r != 1]).end().only("DDP207")
    assert (finding.ranks, finding.step) == (outliers, 3)
    assert finding.evidence["steps"]["1"] == 3


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (4, (1,))])
def test_a_step_skipped_in_the_middle(tmp_path: Path, world_size: int, outliers: tuple[int, ...]) -> None:
    """Rank 1 skips the step after its third forward, so each later step comes one forward late there."""
    build = RunBuilder(tmp_path, world_size).wrap().optimizer().train(2)
    for step in range(2, 5):
        build.step(step, outliers=OUTLIERS, forward={1: step + 2})
    finding = build.end().only("DDP207")
    assert (finding.ranks, finding.step) == (outliers, 2)
    assert finding.evidence["forwards_before_step"]["1"] == 4


@pytest.mark.parametrize(
    ("world_size", "forwards", "cause"),
    [
        (3, 4, "a step was skipped on rank 1"),
        (3, 2, "a step was added on rank 1"),
        (2, 4, "a step was skipped on rank 1, or added on rank 0"),
    ],
)
def test_forwards_identify_ranks_by_majority(
    tmp_path: Path, world_size: int, forwards: int, cause: str
) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().optimizer().train(2)
    assert build.step(2, outliers=OUTLIERS, forward={1: forwards}).end().only("DDP207").cause == cause


@pytest.mark.parametrize(
    ("reduced", "forwards", "cause", "ranks"),
    [
        ({0: 1, 1: 2}, 4, "a step was skipped on rank 1", (1,)),
        ({0: 1, 1: 0}, 2, "a step was added on rank 1", (1,)),
        # Micro-batches that are all reduced: twice as many as the others.
        ({0: 2, 1: 4}, 10, "a step was skipped on rank 1", (1,)),
        # The majority is wrong for once.
        ({0: 1, 1: 2, 2: 2}, 4, "a step was skipped on ranks 1-2", (1, 2)),
        ({0: 1, 1: 1}, 4, "a step was skipped on rank 1, or added on rank 0", (0, 1)),
    ],
)
def test_reductions_identify_ranks_without_a_majority(
    tmp_path: Path, reduced: dict[int, int], forwards: int, cause: str, ranks: tuple[int, ...]
) -> None:
    build = RunBuilder(tmp_path, len(reduced)).wrap().optimizer()
    build.apply(0).step(0).apply(1).step(1)
    outliers = {rank: ["body.bias"] for rank in range(1, len(reduced))}
    build.apply(2, outliers=outliers, on={rank: {"synced": count} for rank, count in reduced.items()})
    build.step(2, outliers=outliers, forward=dict.fromkeys(outliers, forwards))
    finding = build.end().only("DDP207")
    assert (finding.cause, finding.ranks) == (cause, ranks)


def test_no_step_was_skipped_if_forwards_agree(tmp_path: Path) -> None:
    """Twice as many reductions before a step and the same forwards: no rank skipped a step."""
    build = RunBuilder(tmp_path, 2).wrap().optimizer().apply(0, on={1: {"synced": 2}}).step(0)
    assert [finding.code for finding in build.end().findings()] == ["DDP214"]


def joined(build: RunBuilder) -> RunBuilder:
    for rank in build.ranks:
        build.add(rank, JoinRecord(0, 0))
    return build


def test_inside_join_ranks_may_take_any_number_of_steps(tmp_path: Path) -> None:
    build = joined(RunBuilder(tmp_path, 2).wrap()).optimizer().train(3).step(3, ranks=[0])
    assert build.end().findings() == []


def test_inside_join_forwards_explain_nothing(tmp_path: Path) -> None:
    build = joined(RunBuilder(tmp_path, 2).wrap()).optimizer().train(2)
    build.step(2, outliers=OUTLIERS, forward={1: 9}).end().only("DDP201")


def test_ranks_that_were_stopped_could_not_take_their_last_step(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().train(3).step(3, ranks=[0])
    build.notes.append({"kind": "signal", "signal": "SIGINT", "time": 50.0})
    build.exited(0, 51.0).exited(1, 51.0)
    assert build.findings() == []


def test_with_every_so_often_totals_are_still_equal(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().step(0).step(10).step(20).end()
    assert build.findings("DDP207") == []


def receives(tmp_path: Path, last: str) -> RunBuilder:
    """Rank 0 steps with an optimizer; rank 1 has none and receives the result."""
    build = RunBuilder(tmp_path, 2).wrap()
    build.add(0, OptimizerRecord(0, "SGD", 0, [[0, 1, 2]]))
    for step in range(4):
        root = f"{step:032x}"
        build.add(0, DigestRecord(0, "params", step, root, "", 2, optimizer=0, forward=step + 1))
        own = root if step < 3 else last
        build.add(1, DigestRecord(0, "params", step, own, "", 2, forward=step + 1))
    return build.end()


def test_a_rank_that_receives_every_step_takes_none(tmp_path: Path) -> None:
    assert receives(tmp_path / "equal", last=f"{3:032x}").findings("DDP207") == []
    assert receives(tmp_path / "other", last=f"{9:032x}").findings("DDP207") != []


def test_the_same_number_everywhere(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 4).wrap().optimizer().train(3).end().findings("DDP207") == []
