"""Safe text."""

from __future__ import annotations

import pytest

from ddpcheck.reports.safe_text import safe_ascii, safe_line, shortened


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
