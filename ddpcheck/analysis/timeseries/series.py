"""A figure over the steps of a job, kept in bounded space: each doubling of its length halves its detail."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from ddpcheck.analysis.timeseries.model import NamedSeries, SeriesKind

# TensorBoard itself shows no more of a line.
THINNING_MOST_POINTS = 1000
LEAST_POINTS = 100
# Points of a line, times the ranks that are shown.
_ROOM = 32_000


def room_for(ranks: int) -> int:
    """Points of each line, where so many ranks have one each."""
    return max(LEAST_POINTS, min(THINNING_MOST_POINTS, _ROOM // max(1, ranks)))


def line(
    figure: SeriesKind, steps: Sequence[int], values: Sequence[float | None], room: int, of: str = ""
) -> NamedSeries | None:
    """What is known of it, thinned; None where nothing is."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    points = _thinned(points, room)
    if not points:
        return None
    return NamedSeries(figure, [step for step, _ in points], [float(value) for _, value in points], of)


def _thinned(points: list[tuple[int, float]], room: int) -> list[tuple[int, float]]:
    """By the step and not by the place, so that lines of different ranks keep the same steps; and the last."""
    grid = 1
    kept = points
    while len(kept) > room:
        grid *= 2
        kept = [point for point in kept if point[0] % grid == 0]
    if points and not kept:
        kept = points[:: -(-len(points) // room)]
    return kept if kept[-1:] == points[-1:] else [*kept, points[-1]]


def there(lines: Iterable[NamedSeries | None]) -> tuple[NamedSeries, ...]:
    return tuple(each for each in lines if each is not None)


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
