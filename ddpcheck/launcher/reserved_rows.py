"""Escape sequences that keep the last rows of a terminal for ddpcheck while others write above them.

A scroll region ends above the rows, so whatever the job prints scrolls by itself and leaves them alone. Each
function gives the bytes of one write: the kernel does not mix a write to a terminal with anybody else's, and the
cursor is back where the job had it before the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence

_SAVE, _RESTORE = "\x1b7", "\x1b8"
# Off with whatever the job has set that would bend our text; restoring the cursor brings all of it back. The first
# of these moves the cursor.
_PLAIN = "\x1b[?6l\x1b(B\x0f\x1b[m"
_WHOLE_SCREEN = "\x1b[r"
_ERASE_REST = "\x1b[J"
_ERASE_LINES_BELOW = f"\x1b[m\x1b[B\r{_ERASE_REST}"
_ERASE_LINE = "\x1b[K"
# In a terminal that has become narrower without our knowing, a line that wraps would make the screen scroll.
_CUT_LINES, _WRAP_LINES = "\x1b[?7l", "\x1b[?7h"
# One row down, scrolling where that is the last one; unlike a newline it stays in its column.
_DOWN = "\x1bD"


def reserve(rows: int, lines: Sequence[str]) -> bytes:
    """Take the last rows of a terminal of `rows` rows and write `lines` there.

    The line the cursor is on moves up if it has to. What stood below it is erased: nothing, or our own lines at
    the place where a terminal of another size had them.
    """
    count = len(lines)
    make_room = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{_DOWN * count}\x1b[{count}A"
    region = f"{_SAVE}{_ERASE_LINES_BELOW}{_PLAIN}\x1b[1;{rows - count}r"
    return f"{make_room}{region}{_written(rows, lines)}{_RESTORE}".encode()


def rewrite(rows: int, lines: Sequence[str]) -> bytes:
    """Write `lines` anew."""
    return f"{_SAVE}{_PLAIN}{_written(rows, lines)}{_RESTORE}".encode()


def give_back(rows: int, count: int) -> bytes:
    """Erase our rows and let the whole screen scroll again."""
    return f"{_SAVE}{_PLAIN}{_WHOLE_SCREEN}\x1b[{rows - count + 1};1H{_ERASE_REST}{_RESTORE}".encode()


def give_back_anywhere() -> bytes:
    """The same in a terminal whose size has changed since: our lines are somewhere below the cursor's."""
    below = f"{_DOWN}\x1b[A{_SAVE}{_ERASE_LINES_BELOW}{_RESTORE}"
    return f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{below}".encode()


def let_go() -> bytes:
    """Let the whole screen scroll again and erase nothing: a program has taken the screen for itself."""
    return f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}".encode()


def _written(rows: int, lines: Sequence[str]) -> str:
    first = rows - len(lines) + 1
    drawn = "".join(f"\x1b[{first + place};1H{line}\x1b[m{_ERASE_LINE}" for place, line in enumerate(lines))
    return f"{_CUT_LINES}{drawn}{_WRAP_LINES}"
