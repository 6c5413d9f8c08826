"""Shows how much of a run's records has been read, where that takes longer than two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

FIRST_SECONDS = 2.0
# Between updates on a terminal, and between lines in a log.
TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0
_ERASE_LINE = "\r\x1b[K"


class ReadingProgress:
    """Called with the bytes that were read and those of all files. On a terminal it updates one line, and erases it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._due = clock() + FIRST_SECONDS
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if now < self._due:
            return
        self._due = now + (TERMINAL_SECONDS if self._terminal else LOG_SECONDS)
        share = min(100, 100 * done // max(1, total))
        text = f"ddpcheck: reading records: {share} % of {total / 1e6:.0f} MB"
        self._stream.write(f"{_ERASE_LINE}{text}" if self._terminal else f"{text}\n")
        self._stream.flush()
        self._shown = True

    def __enter__(self) -> ReadingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._terminal:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
