"""Batches compared across ranks, and losses that grow with the number of rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ddpcheck.analysis.data.batches import MOST_STEPS, LossByCount

RANKS = range(3)


def judged(
    counts: Callable[[random.Random, int], int],
    loss: Callable[[float, int, int], float],
    steps: int = 20,
    noise: float = 0.1,
    forwards: int = 1,
) -> bool:
    """`counts` of a rank, and its `loss` from a mean over its own samples, their number and that of all ranks."""
    drawn = random.Random(7)
    losses_by_count = LossByCount(1.1)
    losses: dict[int, dict[int, float]] = {rank: {} for rank in RANKS}
    for step in range(steps):
        rows = [{rank: counts(drawn, rank) for rank in RANKS} for _ in range(forwards)]
        for row in rows:
            losses_by_count.add(step, row)
        total = sum(sum(row.values()) for row in rows)
        for rank in RANKS:
            level = (3.0 - step / steps) * math.exp(drawn.gauss(0, noise))
            losses[rank][step] = sum(loss(level, row[rank], total) for row in rows)
    return losses_by_count.grows(losses)


def by_chance(drawn: random.Random, rank: int) -> int:
    return drawn.randint(10, 60)


def by_rank(drawn: random.Random, rank: int) -> int:
    return (12, 4, 8)[rank]


def seldom(drawn: random.Random, rank: int) -> int:
    return 3 if rank == 1 and drawn.random() < 0.25 else 8


def mean(level: float, count: int, total: int) -> float:
    return level


def summed(level: float, count: int, total: int) -> float:
    return level * count


def shared(level: float, count: int, total: int) -> float:
    return level * count * len(RANKS) / total


@pytest.mark.parametrize("counts", [by_chance, by_rank, seldom])
@pytest.mark.parametrize(("loss", "grows"), [(mean, False), (summed, True), (shared, True)])
def test_sums_grow_and_means_do_not(counts: object, loss: object, grows: bool) -> None:
    assert judged(counts, loss, steps=40) is grows  # type: ignore[arg-type]


@pytest.mark.parametrize(("loss", "grows"), [(mean, False), (shared, True)])
def test_micro_batches_of_a_step_add_up(loss: object, grows: bool) -> None:
    assert judged(by_chance, loss, forwards=3) is grows  # type: ignore[arg-type]


def test_unknown_values_are_omitted() -> None:
    assert not judged(by_chance, summed, steps=2)
    assert not judged(by_chance, summed, noise=3.0)
    assert not judged(by_chance, lambda level, count, total: -level * count)
    assert not judged(by_chance, lambda level, count, total: math.nan)


def test_harder_data_on_the_rank_with_more_is_not_a_sum() -> None:
    """Counts always differ by a quarter, and losses by a fifth."""
    hard = {10: 1.2, 8: 1.0, 9: 1.1}
    assert not judged(
        lambda _, rank: (10, 8, 9)[rank], lambda level, count, total: level * hard[count], noise=0.01
    )


def test_a_rank_without_losses_is_inconclusive() -> None:
    losses_by_count = LossByCount(1.1)
    for step in range(9):
        losses_by_count.add(step, {0: 10, 1: 20 + step})
    assert not losses_by_count.grows({0: dict.fromkeys(range(9), 1.0)})


def test_memory_is_bounded() -> None:
    losses_by_count = LossByCount(1.1)
    for step in range(10 * MOST_STEPS):
        losses_by_count.add(step, {rank: 8 + rank * 8 for rank in range(100)})
    assert len(losses_by_count.steps) <= MOST_STEPS
    assert max(map(len, losses_by_count.steps.values())) == 16
    assert all(step % losses_by_count.every == 0 for step in losses_by_count.steps)
