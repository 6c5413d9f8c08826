"""Text of the job made safe: control characters and escape sequences become visible."""

from __future__ import annotations

import unicodedata

# Control, format (bidirectional overrides, zero-width), surrogate, line and paragraph separator.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def safe_line(text: object) -> str:
    """One line without control characters; a newline becomes a visible `\\n`."""
    return "".join(_visible(character) for character in str(text))


def safe_ascii(text: object) -> str:
    """One line of ASCII only."""
    return safe_line(text).encode("ascii", "backslashreplace").decode("ascii")


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters, with a note of what was left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text) - limit} more characters)"


def _visible(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    # The short forms (\n, \t, \x1b, \u202e) are the ones people recognise.
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
