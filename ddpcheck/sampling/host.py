"""Memory and input/output of the ranks of this node, as /proc shows them."""

from __future__ import annotations

import os
from typing import Any

_CPU_TIMES = "/proc/stat"
_MEMORY = "/proc/meminfo"
# Of the numbers behind "cpu": user nice system idle iowait irq softirq steal; guest time is in user already.
_COUNTED = 8
_IDLE = (3, 4)


class Cpu:
    """The share of all processors' time that was used between two readings."""

    def __init__(self) -> None:
        self._busy, self._all = _times()

    def read(self) -> float:
        """In percent, 100 for all processors at work."""
        busy, total = _times()
        share = (busy - self._busy) / (total - self._all) if total > self._all else 0.0
        self._busy, self._all = busy, total
        return round(100 * min(1.0, max(0.0, share)), 1)


def describe() -> dict[str, Any]:
    return {"cpus": os.cpu_count() or 0, "memory": _memory().get("MemTotal", 0)}


def memory_used() -> int:
    """Bytes that no program could have any more without others giving way."""
    memory = _memory()
    return memory.get("MemTotal", 0) - memory.get("MemAvailable", 0)


def _times() -> tuple[int, int]:
    try:
        with open(_CPU_TIMES) as file:
            times = [int(number) for number in file.readline().split()[1 : _COUNTED + 1]]
    except (OSError, ValueError):
        return 0, 0
    return sum(times) - sum(times[place] for place in _IDLE if place < len(times)), sum(times)


def _memory() -> dict[str, int]:
    found = {}
    try:
        with open(_MEMORY) as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(value.split()[0]) * 1024
                if len(found) == 2:
                    break
    except (OSError, ValueError, IndexError):
        return {}
    return found


_PAGE = os.sysconf("SC_PAGE_SIZE")
# Bytes that came from or went to storage: what the page cache served is not in them.
_STORAGE = ("read_bytes", "write_bytes")


class RankProcesses:
    """The ranks that the launcher has met so far."""

    def __init__(self) -> None:
        self._namespace = network_namespace()
        self._pids: dict[int, int] = {}
        # Ranks arrive on the launcher's thread; a dictionary must not grow while it is gone through.
        self._met: list[tuple[int, int]] = []

    def add(self, rank: int, pid: int) -> None:
        self._met.append((rank, pid))

    def read(self) -> dict[str, list[int]]:
        """By rank: process id, resident bytes, bytes read from storage, bytes written to it."""
        while self._met:
            rank, pid = self._met.pop(0)
            # Two launchers on one host, as in a rehearsal of several nodes: each has its own namespace.
            if network_namespace(pid) in ("", self._namespace):
                self._pids[rank] = pid
        found = {}
        for rank, pid in list(self._pids.items()):
            resident = _resident(pid)
            if resident is None:
                del self._pids[rank]
                continue
            found[str(rank)] = [pid, resident, *_storage(pid)]
        return found


def network_namespace(pid: int | None = None) -> str:
    """Names the network namespace of a process; empty where that is not told."""
    try:
        return os.readlink(f"/proc/{'self' if pid is None else pid}/ns/net")
    except OSError:
        return ""


def _resident(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


def _storage(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/io") as file:
            numbers = dict(line.split(": ", 1) for line in file if ": " in line)
        return [int(numbers[name]) for name in _STORAGE]
    except (OSError, ValueError, KeyError):
        return [0, 0]
