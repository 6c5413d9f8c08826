"""Ranges of steps in which values of ranks differ."""

from __future__ import annotations

from ddpcheck.analysis.collectors.accumulation import AccumulationDifference, differences


def test_ranks_that_never_differ() -> None:
    assert differences({0: [(0, 1), (4, 2)], 1: [(0, 1), (4, 2)]}, {0: 9, 1: 9}) == []


def test_a_range_and_one_until_the_end() -> None:
    found = differences({0: [(0, 1)], 1: [(0, 1), (2, 3), (5, 1), (7, 2)]}, {0: 9, 1: 9})
    assert found == [
        AccumulationDifference(2, 4, {0: 1, 1: 3}),
        AccumulationDifference(7, None, {0: 1, 1: 2}),
    ]


def test_a_rank_takes_part_until_it_ends_and_while_its_value_is_known() -> None:
    assert differences({0: [(0, 1)], 1: [(0, 1), (6, 2)]}, {0: 6, 1: 9}) == []
    assert differences({0: [(0, None)], 1: [(0, 2)]}, {0: 9, 1: 9}) == []
    assert differences({0: [(3, 1)], 1: [(0, 2), (3, 1)]}, {0: 9, 1: 9}) == []


def test_nothing_was_collected() -> None:
    assert differences({}, {}) == []
