"""Processor and memory use of the node, and memory and storage I/O of its ranks, from /proc."""

from __future__ import annotations

import os
from typing import Any

_CPU_TIMES = "/proc/stat"
_MEMORY = "/proc/meminfo"
# The columns after "cpu": user nice system idle iowait irq softirq steal. Guest time is part of user.
_CPU_COLUMNS = 8
_IDLE_COLUMNS = (3, 4)
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Bytes transferred from and to storage, without those that the page cache served.
_STORAGE_FIELDS = ("read_bytes", "write_bytes")


class Cpu:
    """The share of all processor time that was used between two readings."""

    def __init__(self) -> None:
        self._busy, self._all = _times()

    def read(self) -> float:
        """In percent; 100 if all processors are busy."""
        busy, total = _times()
        share = (busy - self._busy) / (total - self._all) if total > self._all else 0.0
        self._busy, self._all = busy, total
        return round(100 * min(1.0, max(0.0, share)), 1)


def describe() -> dict[str, Any]:
    return {"cpus": os.cpu_count() or 0, "memory": _memory().get("MemTotal", 0)}


def memory_used() -> int:
    """Bytes that are not available to programs."""
    memory = _memory()
    return memory.get("MemTotal", 0) - memory.get("MemAvailable", 0)


def _times() -> tuple[int, int]:
    try:
        with open(_CPU_TIMES) as file:
            times = [int(number) for number in file.readline().split()[1 : _CPU_COLUMNS + 1]]
    except (OSError, ValueError):
        return 0, 0
    return sum(times) - sum(times[column] for column in _IDLE_COLUMNS if column < len(times)), sum(times)


def _memory() -> dict[str, int]:
    memory = {}
    try:
        with open(_MEMORY) as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    memory[name] = int(value.split()[0]) * 1024
                if len(memory) == 2:
                    break
    except (OSError, ValueError, IndexError):
        return {}
    return memory


class RankProcesses:
    """The known ranks of this node."""

    def __init__(self) -> None:
        self._namespace = network_namespace()
        self._pids: dict[int, int] = {}
        # Filled by the launcher's thread: the dictionary must not change while another thread iterates over it.
        self._new: list[tuple[int, int]] = []

    def add(self, rank: int, pid: int) -> None:
        self._new.append((rank, pid))

    def read(self) -> dict[str, list[int]]:
        """By rank: process id, resident bytes, bytes read from storage, bytes written to it."""
        while self._new:
            rank, pid = self._new.pop(0)
            # Two launchers on one host, as in tests with several nodes, have their own network namespaces.
            if network_namespace(pid) in ("", self._namespace):
                self._pids[rank] = pid
        result = {}
        for rank, pid in list(self._pids.items()):
            resident = _resident(pid)
            if resident is None:
                del self._pids[rank]
                continue
            result[str(rank)] = [pid, resident, *_storage(pid)]
        return result


def network_namespace(pid: int | None = None) -> str:
    """Id of the network namespace of a process; empty if unknown."""
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
        return [int(numbers[name]) for name in _STORAGE_FIELDS]
    except (OSError, ValueError, KeyError):
        return [0, 0]
