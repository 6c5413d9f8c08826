"""Converts counters that wrap around or are reset into totals."""

from __future__ import annotations

from collections.abc import Hashable

BITS = 64


class CounterTotals:
    """Totals of many counters since their first readings."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        self._total: dict[Hashable, int] = {}

    def add(self, key: Hashable, reading: int, bits: int = BITS) -> int:
        """Add a reading of a counter with `bits` bits; the total so far, 0 at the first reading."""
        last = self._last.get(key)
        self._last[key] = reading
        self._total[key] = self._total.get(key, 0) + (0 if last is None else increase(last, reading, bits))
        return self._total[key]

    def total(self, key: Hashable) -> int:
        return self._total.get(key, 0)


def increase(last: int, reading: int, bits: int = BITS) -> int:
    """The increase of a counter between two readings.

    A smaller reading means a wrap-around, or a reset of the device to 0. If a wrap-around would mean an increase of
    less than half the range, it is one. Otherwise it is a reset, and the reading is the increase since then.
    """
    if reading >= last:
        return reading - last
    wrapped = reading - last + (1 << bits)
    return wrapped if 0 <= wrapped < 1 << (bits - 1) else reading
