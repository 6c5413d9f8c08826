"""The small pieces of text every report for people is made of."""

from __future__ import annotations

import pytest

from ddpcheck.reports.rank_ranges import rank_ranges, ranks_phrase
from ddpcheck.reports.safe_text import safe_ascii, safe_line, shortened


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 7], "0-2, 7"),
        ([7, 2, 1, 0, 0], "0-2, 7"),
        (range(1023), "0-1022"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 more"),
    ],
)
def test_ranges(ranks: list[int], expected: str) -> None:
    assert rank_ranges(ranks) == expected


def test_phrases() -> None:
    assert [ranks_phrase(ranks) for ranks in ([], [2], [2, 2], [0, 1])] == [
        "no rank",
        "rank 2",
        "rank 2",
        "ranks 0-1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("größer 模型", "größer 模型"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b\u202e\u200b\u2028", "\\x9b\\u202e\\u200b\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_hidden_characters_show(text: str, expected: str) -> None:
    assert safe_line(text) == expected


def test_ascii_has_nothing_else() -> None:
    assert safe_ascii("é\n") == "\\xe9\\n"


def test_long_text_says_what_is_missing() -> None:
    assert shortened("abc", 3) == "abc"
    assert shortened("abcdef", 4) == "abcd ... (2 more characters)"
