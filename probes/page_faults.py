"""Pages that the training thread faulted in, and the kernel's time: tells of memory that is taken anew each step."""

from __future__ import annotations

import resource
from threading import get_ident
from typing import NamedTuple


class Faulted(NamedTuple):
    """Faults, and microseconds of system time with whatever else the kernel did; -1: not known."""

    faults: int
    kernel: int


UNKNOWN = Faulted(-1, -1)
# Linux counts by thread. Of a whole process, threads that communicate would be in it too.
_OF_THIS_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)


class PageFaults:
    """Reads the kernel's own count for the thread that calls; a microsecond each time."""

    def __init__(self) -> None:
        self._thread = 0
        self._before = UNKNOWN

    def since_last(self) -> Faulted:
        """Since the last call from the same thread."""
        if _OF_THIS_THREAD is None:
            return UNKNOWN
        thread = get_ident()
        usage = resource.getrusage(_OF_THIS_THREAD)
        now = Faulted(usage.ru_minflt + usage.ru_majflt, round(usage.ru_stime * 1e6))
        before, self._before = self._before, now
        followed, self._thread = self._thread, thread
        if followed != thread:
            return UNKNOWN
        return Faulted(now.faults - before.faults, now.kernel - before.kernel)
