"""How long the training thread stood in line for a processor: tells a busy host from a slow rank."""

from __future__ import annotations

import contextlib
import os
from threading import get_ident

SCHEDSTAT = "/proc/thread-self/schedstat"
UNKNOWN = -1


class ProcessorQueue:
    """Reads the kernel's own count for the thread that calls; two microseconds each time."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._path = path
        self._thread = 0
        self._file = -1
        self._before = UNKNOWN

    def since_last(self) -> int:
        """Microseconds since the last call from the same thread; -1 where that is not known."""
        if get_ident() != self._thread:
            self._follow()
        before, self._before = self._before, self._read()
        return (self._before - before) // 1000 if min(before, self._before) >= 0 else UNKNOWN

    def close(self) -> None:
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _follow(self) -> None:
        """The name stands for the thread that opens it, so each thread needs a file of its own."""
        self.close()
        self._thread = get_ident()
        self._before = UNKNOWN
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self) -> int:
        """Nanoseconds so far: the second of three numbers."""
        if self._file < 0:
            return UNKNOWN
        try:
            return int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return UNKNOWN
