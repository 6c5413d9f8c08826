"""What the system counts for this process: memory, bytes read, and when it started."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

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
