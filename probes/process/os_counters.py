"""What the system counts for this process: memory, bytes read, and when it started."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from threading import get_ident
from typing import NamedTuple


class PageFaultCount(NamedTuple):
    """Faults, and microseconds of system time with whatever else the kernel did; -1: not known."""

    faults: int
    kernel: int


UNKNOWN = PageFaultCount(-1, -1)
# Linux counts by thread. Of a whole process, threads that communicate would be in it too.
_OF_THIS_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)


class PageFaults:
    """Reads the kernel's own count for the thread that calls; a microsecond each time."""

    def __init__(self) -> None:
        self._thread = 0
        self._before = UNKNOWN

    def since_last(self) -> PageFaultCount:
        """Since the last call from the same thread."""
        if _OF_THIS_THREAD is None:
            return UNKNOWN
        thread = get_ident()
        usage = resource.getrusage(_OF_THIS_THREAD)
        now = PageFaultCount(usage.ru_minflt + usage.ru_majflt, round(usage.ru_stime * 1e6))
        before, self._before = self._before, now
        followed, self._thread = self._thread, thread
        if followed != thread:
            return UNKNOWN
        return PageFaultCount(now.faults - before.faults, now.kernel - before.kernel)


SCHEDSTAT = "/proc/thread-self/schedstat"
PROCESSOR_QUEUE_UNKNOWN = -1


class ProcessorQueue:
    """Reads the kernel's own count for the thread that calls; two microseconds each time."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._path = path
        self._thread = 0
        self._file = -1
        self._before = PROCESSOR_QUEUE_UNKNOWN

    def since_last(self) -> int:
        """Microseconds since the last call from the same thread; -1 where that is not known."""
        if get_ident() != self._thread:
            self._follow()
        before, self._before = self._before, self._read()
        return (self._before - before) // 1000 if min(before, self._before) >= 0 else PROCESSOR_QUEUE_UNKNOWN

    def close(self) -> None:
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _follow(self) -> None:
        """The name stands for the thread that opens it, so each thread needs a file of its own."""
        self.close()
        self._thread = get_ident()
        self._before = PROCESSOR_QUEUE_UNKNOWN
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self) -> int:
        """Nanoseconds so far: the second of three numbers."""
        if self._file < 0:
            return PROCESSOR_QUEUE_UNKNOWN
        try:
            return int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return PROCESSOR_QUEUE_UNKNOWN


_PAGE = os.sysconf("SC_PAGE_SIZE")


class Resident(NamedTuple):
    """Memory of the process in bytes: all of it, and pages that no file and no other process is behind."""

    whole: int
    own: int


class Reads(NamedTuple):
    """Bytes read so far: by system calls, from wherever, and those that storage had to be asked for."""

    asked: int
    storage: int


def resident() -> Resident:
    """Read anew each time: an open descriptor would be the user's to stumble over."""
    data = _read("/proc/self/statm").split()
    if len(data) < 3:
        return Resident(0, 0)
    whole, shared = int(data[1]) * _PAGE, int(data[2]) * _PAGE
    return Resident(whole, whole - shared)


def most_resident() -> int:
    """The most this process ever held."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def reads() -> Reads:
    """Nothing read, where the system does not tell."""
    counts = dict(line.split(b": ", 1) for line in _read("/proc/self/io").splitlines() if b": " in line)
    return Reads(int(counts.get(b"rchar", 0)), int(counts.get(b"read_bytes", 0)))


def process_start() -> float:
    """When this process began, in seconds since 1970, to a hundredth; 0 where that is not known."""
    fields = _read("/proc/self/stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        return 0.0
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 14)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
