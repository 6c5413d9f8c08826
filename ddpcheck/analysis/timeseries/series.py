"""A figure over the steps of a job, kept in bounded space: each doubling of its length halves its detail."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from statistics import median

MOST_POINTS = 1024


class Series:
    """Steps and values, in order. A value holds until the next one is told."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("q")
        self._stride = 1

    def add(self, step: int, value: int) -> None:
        # A restarted count, or a second optimizer: what came first stays.
        if self.steps and step <= self.steps[-1]:
            return
        if self.steps and step - self.steps[-1] < self._stride:
            return
        # No memory is so large: a damaged record.
        if max(abs(step), abs(value)) >> 62:
            return
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MOST_POINTS:
            self._stride = 2 * max(self._stride, (self.steps[-1] - self.steps[0]) // MOST_POINTS)
            self._thin()

    def _thin(self) -> None:
        kept = [0]
        for place in range(1, len(self.steps)):
            if self.steps[place] - self.steps[kept[-1]] >= self._stride:
                kept.append(place)
        self.steps = array("q", [self.steps[place] for place in kept])
        self.values = array("q", [self.values[place] for place in kept])

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.steps, self.values, strict=True)

    def at(self, step: float) -> int:
        return self.values[max(0, bisect_right(self.steps, step) - 1)]

    def median(self, first: float, last: float) -> float:
        """Over the steps from `first` to `last`, at so many of them that more would not change it."""
        count = int(min(101, max(1, last - first + 1)))
        apart = (last - first) / max(1, count - 1)
        return median(self.at(first + number * apart) for number in range(count))
