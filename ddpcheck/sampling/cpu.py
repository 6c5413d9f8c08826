"""How busy the processors of the node are, and how much of its memory is in use."""

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
