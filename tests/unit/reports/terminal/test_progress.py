"""Progress is shown where reading takes long: one line on a terminal, a few lines in a log."""

from __future__ import annotations

import io

import pytest

from ddpcheck.reports.terminal.progress import FIRST_SECONDS, LOG_SECONDS, ReadingProgress


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(seconds: float, *, terminal: bool) -> str:
    stream, now = Stream(terminal), 0.0
    with ReadingProgress(stream, lambda: now) as progress:
        while now < seconds:
            progress(int(1e6 * now), int(1e6 * seconds))
            now += 0.1
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_shown_in_the_first_seconds(terminal: bool) -> None:
    assert shown(FIRST_SECONDS - 0.5, terminal=terminal) == ""


def test_a_terminal_has_one_line_that_is_erased() -> None:
    text = shown(8, terminal=True)
    assert "50 %" in text
    assert "\n" not in text
    assert text.endswith("\r\x1b[K")


def test_a_log_has_few_lines() -> None:
    lines = shown(2 * LOG_SECONDS, terminal=False).splitlines()
    assert 0 < len(lines) <= 2
    assert "\x1b" not in "".join(lines)
