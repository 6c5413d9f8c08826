"""Ranks whose gradients are zero, or all of another size."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from ddpcheck.analysis.allreduce.gradient_weights import FEWEST_BACKWARDS, GradientWeights
from ddpcheck.analysis.allreduce.mean_check import SketchTable
from ddpcheck.records.codecs import pack
from tests.helpers.run_builder import sketch_of

PARAMETERS = 4


def table(norms: Mapping[int, Sequence[float]]) -> SketchTable:
    return SketchTable({rank: pack(map(sketch_of, row)) for rank, row in norms.items()})


def weights(
    factor: Callable[[int, int, int], float], ranks: int = 3, backwards: int = 16, noise: float = 0.2
) -> GradientWeights:
    """`factor` by rank, backward and parameter."""
    drawn = random.Random(3)
    found = GradientWeights()
    for number in range(backwards):
        found.add(
            table(
                {
                    rank: [
                        factor(rank, number, index) * (1 + index) * (1 + noise * drawn.uniform(-1, 1))
                        for index in range(PARAMETERS)
                    ]
                    for rank in range(ranks)
                }
            )
        )
    return found


def test_equal_ranks() -> None:
    found = weights(lambda rank, number, index: 1.0)
    assert (found.silent(), found.factors()) == ((), {})


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_rank_is_four_times_as_large(ranks: int) -> None:
    found = weights(lambda rank, number, index: 4.0 if rank == 1 else 1.0, ranks).factors()
    assert list(found) == [1]
    assert found[1] == pytest.approx(4.0, rel=0.25)


@pytest.mark.parametrize(
    "factor",
    [
        # Only some parameters, as with inputs of another scale.
        lambda rank, number, index: 4.0 if rank == 1 and index < 2 else 1.0,
        # Only later: harder data.
        lambda rank, number, index: 4.0 if rank == 1 and number > 4 else 1.0,
        lambda rank, number, index: 1.5 if rank == 1 else 1.0,
    ],
)
def test_no_common_factor(factor: Callable[[int, int, int], float]) -> None:
    assert weights(factor).factors() == {}


def test_too_few_backwards() -> None:
    found = weights(lambda rank, number, index: 4.0 * rank, backwards=FEWEST_BACKWARDS - 1)
    assert (found.silent(), found.factors()) == ((), {})


def test_a_rank_without_gradients() -> None:
    assert weights(lambda rank, number, index: float(rank != 2)).silent() == (2,)
    now_and_then = weights(lambda rank, number, index: float(rank != 2 or number % 2))
    assert now_and_then.silent() == ()
    assert weights(lambda rank, number, index: 0.0).silent() == ()
