"""Counters that increase, wrap around and are reset."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.sampling.interfaces import CounterTotals, increase


@pytest.mark.parametrize(
    ("last", "reading", "bits", "expected"),
    [
        (5, 9, 64, 4),
        (7, 7, 32, 0),
        (2**32 - 10, 5, 32, 15),  # around
        (2**64 - 1, 0, 64, 1),
        (10**12, 300, 64, 300),  # set back to 0 by a reset
        (2**20, 10, 32, 10),
    ],
)
def test_increase(last: int, reading: int, bits: int, expected: int) -> None:
    assert increase(last, reading, bits) == expected


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30))
def test_totals_of_a_narrow_counter_are_exact(start: int, steps: list[int]) -> None:
    totals, true = CounterTotals(), 0
    assert totals.add("c", start, 32) == 0
    for step in steps:
        true += step
        assert totals.add("c", (start + true) % 2**32, 32) == true
    assert totals.total("c") == true


def test_counters_do_not_mix() -> None:
    totals = CounterTotals()
    totals.add("a", 100)
    totals.add("b", 5)
    assert (totals.add("a", 101), totals.add("b", 9), totals.total("c")) == (1, 4, 0)
