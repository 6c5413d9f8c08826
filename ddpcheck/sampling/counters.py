"""Counters that grow, wrap around and start again, turned into totals."""

from __future__ import annotations

from collections.abc import Hashable

BITS = 64


class CounterTotals:
    """What each of many counters has counted since its first reading."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        self._total: dict[Hashable, int] = {}

    def add(self, key: Hashable, reading: int, bits: int = BITS) -> int:
        """Take a reading of a counter that is `bits` wide; the total so far, 0 at the first reading."""
        last = self._last.get(key)
        self._last[key] = reading
        self._total[key] = self._total.get(key, 0) + (0 if last is None else growth(last, reading, bits))
        return self._total[key]

    def total(self, key: Hashable) -> int:
        return self._total.get(key, 0)


def growth(last: int, reading: int, bits: int = BITS) -> int:
    """How far a counter has come between two readings.

    One that goes back has wrapped around, or was set to 0 by a reset of its device. A wrap leaves it not far
    from where it was, as the counter sees it; after a reset, what it shows is what came since.
    """
    if reading >= last:
        return reading - last
    wrapped = reading - last + (1 << bits)
    return wrapped if 0 <= wrapped < 1 << (bits - 1) else reading
