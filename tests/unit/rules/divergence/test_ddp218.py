"""DDP218: ranks weight their gradients differently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.modules import LossRecord
from ddpcheck.records.kinds.state import LossFormRecord
from tests.helpers.run_builder import RunBuilder

STEPS = 12


def run(folder: Path, factors: Mapping[int, float] | None = None, world_size: int = 3) -> RunBuilder:
    """`factors`: of the local gradients of ranks."""
    build = RunBuilder(folder, world_size).wrap().optimizer().train(STEPS)
    by_rank = {rank: (factors or {}).get(rank, 1.0) for rank in build.ranks}
    for number in range(1, STEPS + 1):
        local = {
            rank: [by_rank[rank] * (1.0 + index + number / 50 + rank / 100) for index in range(3)]
            for rank in build.ranks
        }
        mean = [sum(local[rank][index] for rank in build.ranks) / world_size for index in range(3)]
        build.backward(number, local, mean)
    return build


def form(
    build: RunBuilder,
    rank: int,
    step: int = 0,
    factor: float = 1.0,
    reduction: str = "mean",
    function: str = "NllLoss",
) -> RunBuilder:
    build.add(rank, LossFormRecord(0, step, [function], [reduction], [factor], "/home/me/train.py:12"))
    return build


def losses(build: RunBuilder, by_rank: Mapping[int, float]) -> RunBuilder:
    for rank in build.ranks:
        value = by_rank.get(rank, 1.0)
        build.add(rank, LossRecord(0, 0, [value * (1 + step / 30) for step in range(STEPS)]))
    return build


def test_equal_losses(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        form(build, rank, factor=0.25)
    assert build.end().findings() == []


def test_a_sum_on_one_rank(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        form(build, rank, reduction="sum" if rank == 1 else "mean")
    finding = build.end().only("DDP218")
    assert (finding.severity.value, finding.step, finding.ranks) == ("warning", 0, (1,))
    assert "a sum over the batch on rank 1" in finding.cause
    assert finding.evidence["backward_at"]["rank 1"] == "/home/me/train.py:12"


def test_another_factor_from_some_step_on(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        form(build, rank, factor=0.25)
    finding = form(build, 2, step=6).end().only("DDP218")
    assert (finding.step, finding.ranks) == (6, (2,))
    assert finding.evidence["factors"] == {"ranks 0-1": 0.25, "rank 2": 1.0}


def test_other_functions_are_other_tasks(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        form(build, rank, factor=1 + rank, function="MseLoss" if rank == 1 else "NllLoss")
    assert build.end().findings("DDP218") == []


def test_a_short_difference_is_a_change_that_ranks_make_one_after_the_other(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        form(build, rank)
        form(build, rank, step=6 + rank, factor=0.5)
    assert build.end().findings("DDP218") == []


def test_factors_may_make_up_for_batches_of_other_sizes(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        form(build, rank, factor=1.5 if rank == 0 else 0.75)
        for forward in range(6):
            build.add(rank, BatchRecord(forward, digest=f"{rank} {forward}", rows=16 if rank == 0 else 8))
    assert build.end().findings("DDP218") == []


def test_a_rank_whose_gradients_are_zero(tmp_path: Path) -> None:
    build = run(tmp_path, {2: 0.0})
    for rank in build.ranks:
        form(build, rank, factor=float(rank != 2))
    finding = build.end().only("DDP218")
    assert (finding.severity.value, finding.ranks) == ("warning", (2,))
    assert finding.evidence["ranks_that_contribute"] == 2


@pytest.mark.parametrize(("loss", "severity"), [(4.0, "note"), (1.0, "note"), (16.0, "")])
def test_gradients_that_are_all_larger(tmp_path: Path, loss: float, severity: str) -> None:
    """With other targets, squared errors grow with the square of the gradients."""
    build = losses(run(tmp_path, {1: 4.0}), {1: loss})
    found = build.end().findings("DDP218")
    assert [(finding.ranks, finding.severity.value) for finding in found] == (
        [((1,), severity)] if severity else []
    )


def test_without_losses_the_size_alone_says_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, {1: 4.0}).end().findings("DDP218") == []
