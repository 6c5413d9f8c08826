"""Causes of slow links from a matrix of bandwidths: correct at several sizes, and none in noise."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random

import pytest

from ddpcheck.links.evaluate import Cell, between_nodes, explain, within_nodes

Slow = Callable[[int, int], float]
USUAL = 1e9

CAUSES: dict[str, tuple[Slow, tuple[str, tuple[int, ...]]]] = {
    "node": (lambda a, b: 3.0 if 1 in (a, b) else 1.0, ("slow node", (1,))),
    "sending": (lambda a, b: 3.0 if a == 1 else 1.0, ("slow sending", (1,))),
    "receiving": (lambda a, b: 3.0 if b == 1 else 1.0, ("slow receiving", (1,))),
    "link": (lambda a, b: 3.0 if {a, b} == {0, 1} else 1.0, ("slow link", (0, 1))),
    "direction": (lambda a, b: 3.0 if (a, b) == (0, 1) else 1.0, ("slow direction", (0, 1))),
}


def matrix(nodes: int, noise: float, seed: int, slow: Slow = lambda a, b: 1.0) -> dict[Cell, float]:
    random = Random(seed)
    return {
        (a, b): USUAL * exp(random.gauss(0, noise)) / slow(a, b)
        for a in range(nodes)
        for b in range(nodes)
        if a != b
    }


def causes(rates: dict[Cell, float], noise: float = 0.05) -> list[tuple[str, tuple[int, ...]]]:
    causes = explain(rates, between_nodes(rates), tolerance=1.5, noise=noise)
    return [(cause.hypothesis.kind, cause.hypothesis.units) for cause in causes]


@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_found(nodes: int, name: str) -> None:
    slow, expected = CAUSES[name]
    results = [causes(matrix(nodes, 0.05, seed, slow)) for seed in range(5)]
    assert results == [[expected]] * 5


@pytest.mark.parametrize("name", CAUSES)
def test_of_three_nodes_the_cause_is_correct_or_none(name: str) -> None:
    slow, expected = CAUSES[name]
    results = [causes(matrix(3, 0.03, seed, slow)) for seed in range(20)]
    assert all(one in ([expected], []) for one in results)
    assert results.count([expected]) >= 15


@pytest.mark.parametrize("nodes", [4, 7])
def test_two_islands_are_found(nodes: int) -> None:
    rates = matrix(nodes, 0.05, 0, lambda a, b: 3.0 if (a < 2) != (b < 2) else 1.0)
    assert causes(rates) in ([("islands", (0, 1))], [("islands", tuple(range(2, nodes)))])


def test_factor_confidence_and_rates_are_those_of_the_matrix() -> None:
    rates = matrix(5, 0.02, 1, lambda a, b: 4.0 if 2 in (a, b) else 1.0)
    [cause] = explain(rates, between_nodes(rates), tolerance=1.5)
    assert cause.factor == pytest.approx(4.0, rel=0.05)
    assert cause.usual == pytest.approx(USUAL, rel=0.05)
    assert cause.rate == pytest.approx(USUAL / 4, rel=0.05)
    assert 0.99 < cause.confidence <= 1.0


def test_two_slow_nodes_are_distinguished() -> None:
    rates = matrix(8, 0.05, 0, lambda a, b: (4.0 if 1 in (a, b) else 1.0) * (2.5 if 5 in (a, b) else 1.0))
    assert causes(rates) == [("slow node", (1,)), ("slow node", (5,))]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("nodes", [2, 3, 4, 6])
def test_noise_alone_is_no_cause(nodes: int, noise: float) -> None:
    # The measured noise may be half of the true noise.
    alarms = [seed for seed in range(40) if causes(matrix(nodes, noise, seed), noise / 2)]
    assert alarms == []


def test_one_disturbed_measurement_is_not_a_cause() -> None:
    rates = matrix(4, 0.15, 3)
    rates[2, 0] /= 3
    assert causes(rates, noise=0.25) == []


def test_a_cause_within_the_tolerance_is_not_reported() -> None:
    assert causes(matrix(5, 0.02, 0, lambda a, b: 1.3 if 1 in (a, b) else 1.0)) == []


def test_two_nodes_show_only_one_direction_against_the_other() -> None:
    assert causes(matrix(2, 0.02, 0, lambda a, b: 4.0)) == []
    assert causes(matrix(2, 0.02, 0, lambda a, b: 4.0 if a == 0 else 1.0)) == [("slow direction", (0, 1))]


def test_within_nodes_a_node_or_one_rank_can_be_slow() -> None:
    groups = [(0, 1, 2, 3), (4, 5, 6, 7)]
    pairs = [(a, b) for group in groups for a in group for b in group if a != b]
    random = Random(0)

    def rates(slow: Slow) -> dict[Cell, float]:
        return {(a, b): USUAL * exp(random.gauss(0, 0.03)) / slow(a, b) for a, b in pairs}

    for slow, kind, units in (
        (lambda a, b: 2.5 if a > 3 else 1.0, "slow inside", (1,)),
        (lambda a, b: 2.5 if 6 in (a, b) else 1.0, "slow node", (6,)),
    ):
        measured = rates(slow)
        [cause] = explain(measured, within_nodes(measured, groups), tolerance=1.5)
        assert (cause.hypothesis.kind, cause.hypothesis.units) == (kind, units)
