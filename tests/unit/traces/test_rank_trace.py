"""Unions of intervals."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.traces.rank_trace import Cover, Interval

times = st.integers(min_value=-20, max_value=60)
intervals = st.lists(st.tuples(times, times), max_size=12)


def painted(pieces: list[Interval]) -> set[int]:
    return {time for start, end in pieces for time in range(start, end)}


@given(intervals)
def test_length(pieces: list[Interval]) -> None:
    assert Cover(pieces).length == len(painted(pieces))


@given(intervals)
def test_pieces_are_disjoint_and_ordered(pieces: list[Interval]) -> None:
    cover = list(Cover(pieces))
    assert all(start < end for start, end in cover)
    assert all(one[1] < other[0] for one, other in pairwise(cover))
    assert painted(cover) == painted(pieces)


@given(intervals, intervals)
def test_shared(one: list[Interval], other: list[Interval]) -> None:
    both = len(painted(one) & painted(other))
    assert Cover(one).shared(Cover(other)) == Cover(other).shared(Cover(one)) == both


@given(intervals, times, times)
def test_within(pieces: list[Interval], start: int, end: int) -> None:
    assert Cover(pieces).within(start, end) == len(painted(pieces) & painted([(start, end)]))


@given(intervals, intervals)
def test_without(one: list[Interval], other: list[Interval]) -> None:
    assert painted(list(Cover(one).without(Cover(other)))) == painted(one) - painted(other)


def test_times_since_1970_stay_exact() -> None:
    begin = 1_716_423_322_416_788_066
    assert Cover([(begin, begin + 3), (begin + 2, begin + 4)]).length == 4
