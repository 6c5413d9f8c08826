"""Counters of the operating system for this process: memory, bytes read, page faults, CPU run queue, start time."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from threading import get_ident
from typing import NamedTuple

SCHEDSTAT = "/proc/thread-self/schedstat"
# Linux counts page faults per thread. The count of the process would include communication threads.
_THREAD_USAGE: int | None = getattr(resource, "RUSAGE_THREAD", None)
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class Resident(NamedTuple):
    """Resident memory of the process in bytes: all of it, and private pages without a file."""

    whole: int
    own: int


class Reads(NamedTuple):
    """Bytes read so far: by system calls, and those fetched from storage."""

    asked: int
    storage: int


class PageFaultCount(NamedTuple):
    """Page faults, and microseconds of system time for any reason; -1: unknown."""

    faults: int
    kernel: int


UNKNOWN_PAGE_FAULTS = PageFaultCount(-1, -1)
UNKNOWN_QUEUE_TIME = -1
READ_EVERY_NS = 5_000_000


def resident() -> Resident:
    """Opens the file each time: a descriptor kept open could collide with what the user does with descriptors."""
    data = _read("/proc/self/statm").split()
    if len(data) < 3:
        return Resident(0, 0)
    total, shared = int(data[1]) * _PAGE_SIZE, int(data[2]) * _PAGE_SIZE
    return Resident(total, total - shared)


def peak_resident() -> int:
    """Peak resident memory of this process in bytes."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def reads() -> Reads:
    """Zeros if the system does not report it."""
    counts = dict(line.split(b": ", 1) for line in _read("/proc/self/io").splitlines() if b": " in line)
    return Reads(int(counts.get(b"rchar", 0)), int(counts.get(b"read_bytes", 0)))


def process_start() -> float:
    """When this process started, in seconds since 1970, to a hundredth; 0 if unknown."""
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


class PageFaults:
    """Page faults of the calling thread; takes one microsecond per call."""

    def __init__(self) -> None:
        self._thread = 0
        self._before = UNKNOWN_PAGE_FAULTS

    def since_last(self) -> PageFaultCount:
        """Since the last call from the same thread."""
        if _THREAD_USAGE is None:
            return UNKNOWN_PAGE_FAULTS
        thread = get_ident()
        usage = resource.getrusage(_THREAD_USAGE)
        now = PageFaultCount(usage.ru_minflt + usage.ru_majflt, round(usage.ru_stime * 1e6))
        before, self._before = self._before, now
        last_thread, self._thread = self._thread, thread
        if last_thread != thread:
            return UNKNOWN_PAGE_FAULTS
        return PageFaultCount(now.faults - before.faults, now.kernel - before.kernel)


class ProcessorQueue:
    """Time the calling thread spent runnable without a CPU; takes two microseconds per call."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._path = path
        self._thread = 0
        self._file = -1
        self._before = UNKNOWN_QUEUE_TIME

    def since_last(self) -> int:
        """Microseconds since the last call from the same thread; -1 if unknown."""
        if get_ident() != self._thread:
            self._open()
        before, self._before = self._before, self._read()
        return (self._before - before) // 1000 if min(before, self._before) >= 0 else UNKNOWN_QUEUE_TIME

    def close(self) -> None:
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _open(self) -> None:
        """The path refers to the thread that opens it, so each thread needs its own file."""
        self.close()
        self._thread = get_ident()
        self._before = UNKNOWN_QUEUE_TIME
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self) -> int:
        """Nanoseconds so far: the second of three numbers."""
        if self._file < 0:
            return UNKNOWN_QUEUE_TIME
        try:
            return int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return UNKNOWN_QUEUE_TIME


class StepCounters:
    """What the operating system counts for the training thread, per step.

    Reading takes six microseconds. Steps that follow each other faster than READ_EVERY_NS are read together: each gets
    the mean of the steps of the latest reading.
    """

    def __init__(self) -> None:
        self._queue = ProcessorQueue()
        self._faults = PageFaults()
        self._read_at = 0
        self._steps = 0
        self._means = (UNKNOWN_QUEUE_TIME, *UNKNOWN_PAGE_FAULTS)

    def of_step(self, now: int) -> tuple[int, int, int]:
        """Queue time, page faults and system time of the step that ends at `now`; -1: unknown."""
        self._steps += 1
        if now - self._read_at >= READ_EVERY_NS:
            counts = (self._queue.since_last(), *self._faults.since_last())
            queued, faults, kernel = (count // self._steps if count > 0 else count for count in counts)
            self._means = queued, faults, kernel
            self._read_at, self._steps = now, 0
        return self._means

    def close(self) -> None:
        self._queue.close()
