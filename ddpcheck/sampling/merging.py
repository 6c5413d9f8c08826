"""Makes one sample of several, for jobs so long that not every one can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of several values the highest tells most; of clocks the lowest, and of throttling all reasons together.
_LOWEST = {"clock", "memory_clock"}
_HIGHEST = {"cpu", "memory", "busy", "memory_busy", "temperature", "power"}
_ALL = {"throttled"}


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The later sample, whose totals hold the earlier ones already, with what was notable in the earlier."""
    # What the later one does not tell, as while a driver is silent, stays as it was.
    return {**earlier, **_worst(earlier, later)}


def _worst(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(later)
    if "connections" in earlier:
        result.setdefault("connections", earlier["connections"])  # they are not in every sample
    for name, value in later.items():
        before = earlier.get(name)
        if before is None:
            continue
        if name in _LOWEST:
            result[name] = min(before, value)
        elif name in _HIGHEST:
            result[name] = max(before, value)
        elif name in _ALL:
            result[name] = before | value
        elif name == "gpus":
            result[name] = [_worst(*pair) for pair in zip(before, value, strict=False)]
        elif name == "ranks":
            result[name] = {rank: _larger(before.get(rank), row) for rank, row in value.items()}
    return result


def _larger(before: list[int] | None, row: list[int]) -> list[int]:
    """A rank's memory at its most; the process id and what it read and wrote as they are now."""
    if before is None or before[0] != row[0]:
        return row
    return [row[0], max(before[1], row[1]), *row[2:]]
