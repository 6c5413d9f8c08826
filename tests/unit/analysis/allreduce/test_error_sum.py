"""Whether the errors of a communication hook cancel over backwards."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ddpcheck.analysis.allreduce.collector import ErrorSum

PARAMETERS = 12


def summed(result: Callable[[int, float], float], backwards: int = 30, drift: float = 1.0) -> ErrorSum:
    """`result`: what a hook returns for a parameter whose mean gradient is given."""
    chance, errors = random.Random(0), ErrorSum()
    for number in range(backwards):
        means = {index: drift * (index - 5) + chance.gauss(0, 3) for index in range(PARAMETERS)}
        errors.add(number, {index: (result(index, mean) - mean, mean) for index, mean in means.items()})
    return errors


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_a_hook_with_error_feedback(drift: float) -> None:
    owed = dict.fromkeys(range(PARAMETERS), 0.0)
    chance = random.Random(1)

    def sometimes(index: int, mean: float) -> float:
        owed[index] += mean
        sent = owed[index] if chance.random() < 0.4 else 0.0
        owed[index] -= sent
        return sent

    errors = summed(sometimes, drift=drift)
    assert errors.backwards == 30
    assert errors.single > 0.5
    assert errors.summed < 0.5 * errors.single


@pytest.mark.parametrize("drift", [0.0, 1.0])
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, 3.0])
def test_a_wrong_factor_has_the_same_error_in_the_sum(factor: float, drift: float) -> None:
    errors = summed(lambda _, mean: factor * mean, drift=drift)
    assert errors.summed == pytest.approx(errors.single)


def test_after_a_gap_it_starts_again() -> None:
    errors = ErrorSum()
    errors.add(1, {0: (1.0, 1.0)})
    errors.add(2, {0: (1.0, 1.0)})
    assert errors.backwards == 2
    errors.add(5, {0: (1.0, float("nan"))})
    assert errors.backwards == 1
    assert errors.summed == float("inf")
