"""Page faults that take a large share of the step."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.timing.model import RankTime, Refaults, Spent
from ddpcheck.analysis.timing.straggler import refaults_in


def row(rank: int, faults: int | None, kernel_us: int | None, step_us: int = 12_000) -> RankTime:
    spent = Spent(step_us, step_us, step_us, 1.0)
    return RankTime(rank, spent, {}, 0, 0, faults=faults, kernel_us=kernel_us)


def test_the_rank_that_loses_most_is_reported() -> None:
    rows = [row(0, 1_000, 2_400), row(1, 2_500, 6_000), row(2, 9_000, 100)]
    assert refaults_in(rows) == Refaults(rank=1, faults=2_500, share=0.5)


@pytest.mark.parametrize(
    ("faults", "kernel_us"),
    [(2_500, 1_000), (100, 6_000), (None, None)],
    ids=["little", "something else", "not known"],
)
def test_nothing_worth_reporting(faults: int | None, kernel_us: int | None) -> None:
    assert refaults_in([row(0, 2_000, 600), row(1, faults, kernel_us)]) is None


def test_without_steps_nothing_is_reported() -> None:
    assert refaults_in([row(0, 10, 10, step_us=0)]) is None
