"""Ranks in words: as ranges, and as people would say it."""

from __future__ import annotations

import pytest

from ddpcheck.formatting import name_ranks, rank_ranges


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 7], "0-2, 7"),
        ([7, 2, 1, 0, 0], "0-2, 7"),
        (range(1023), "0-1022"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 8 more"),
    ],
)
def test_ranges(ranks: list[int], expected: str) -> None:
    assert rank_ranges(ranks) == expected


def test_phrases() -> None:
    assert [name_ranks(ranks) for ranks in ([], [2], [2, 2], [0, 1], [7, 0, 1, 4])] == [
        "no rank",
        "rank 2",
        "rank 2",
        "ranks 0-1",
        "ranks 0-1, 4 and 7",
    ]
    assert name_ranks(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 more"
