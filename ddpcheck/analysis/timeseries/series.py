"""Bounded series over the steps of a job: when one is full, its stride doubles and its detail halves."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

from ddpcheck.analysis.timeseries.model import NamedSeries, SeriesKind

# Points of a value series over the steps of one rank.
MOST_POINTS = 1024
# Points of a series in a report: TensorBoard shows no more. Many ranks share a total.
MAX_REPORT_POINTS, MIN_REPORT_POINTS = 1000, 100
_REPORT_POINTS_OF_ALL_RANKS = 32_000

_Value = TypeVar("_Value")


class BoundedSeries:
    """Rows of values by increasing step, at most `limit` of them, one of every `every` steps.

    `columns` gives the name and the array type code of each column; "O" is a list of objects. An aligned series
    keeps the multiples of `every`, the same on all ranks; otherwise the first step of each `every` is kept.
    With `keep_ends` the first and the latest step are kept as well.
    """

    def __init__(
        self, limit: int, columns: Mapping[str, str], *, aligned: bool = True, keep_ends: bool = False
    ) -> None:
        self.limit = limit
        self.every = 1
        self.steps = array("q")
        self.columns: dict[str, Any] = {
            name: [] if code == "O" else array(code) for name, code in columns.items()
        }
        self._aligned = aligned
        self._keep_ends = keep_ends

    def add_row(self, step: int, row: Mapping[str, Any]) -> None:
        """Steps that are not later than the last one are ignored, such as those of a restarted count."""
        if self.steps and step <= self.steps[-1]:
            return
        if self._keep_ends:
            if len(self.steps) > 1 and not self._is_kept(self.steps[-1], self.steps[-2]):
                self._select(range(len(self.steps) - 1))
        elif not self._is_kept(step, self.steps[-1] if self.steps else None):
            return
        self.steps.append(step)
        for name, column in self.columns.items():
            column.append(row[name])
        while len(self.steps) > self.limit:
            self._halve()

    def add_rows(self, steps: Sequence[int], rows: Mapping[str, Sequence[Any]]) -> None:
        """Add consecutive steps of an aligned series. A step for which `rows` has nothing must not be among them."""
        last = self.steps[-1] if self.steps else None
        chosen = [
            index
            for index, step in enumerate(steps)
            if step % self.every == 0 and (last is None or step > last)
        ]
        self.steps.extend([steps[index] for index in chosen])
        for name, column in self.columns.items():
            values = rows[name]
            column.extend(values if len(chosen) == len(steps) else [values[index] for index in chosen])
        while len(self.steps) > self.limit:
            self._halve()

    def _is_kept(self, step: int, previous: int | None) -> bool:
        if self._aligned:
            return step % self.every == 0
        return previous is None or step // self.every > previous // self.every

    def _halve(self) -> None:
        self.every *= 2
        ends = (0, len(self.steps) - 1) if self._keep_ends else ()
        kept: list[int] = []
        for index, step in enumerate(self.steps):
            previous = self.steps[kept[-1]] if kept else None
            if index in ends or self._is_kept(step, previous):
                kept.append(index)
        self._select(kept)

    def _select(self, indices: Sequence[int]) -> None:
        self.steps = array("q", (self.steps[index] for index in indices))
        for name, column in self.columns.items():
            kept = [column[index] for index in indices]
            self.columns[name] = array(column.typecode, kept) if isinstance(column, array) else kept

    def __len__(self) -> int:
        return len(self.steps)


class AggregatedSeries(Generic[_Value]):
    """One value for each `every` steps, at most `limit` of them; values of the same steps are merged."""

    def __init__(self, limit: int, merge: Callable[[_Value, _Value], _Value]) -> None:
        self.limit = limit
        self.every = 1
        # By step // every.
        self.points: dict[int, _Value] = {}
        self._merge = merge

    def add_value(self, step: int, value: _Value) -> None:
        number = step // self.every
        known = self.points.get(number)
        self.points[number] = value if known is None else self._merge(known, value)
        while len(self.points) > self.limit:
            self._halve()

    def _halve(self) -> None:
        self.every *= 2
        halved: dict[int, _Value] = {}
        for number, value in sorted(self.points.items()):
            known = halved.get(number // 2)
            halved[number // 2] = value if known is None else self._merge(known, value)
        self.points = halved


class Series(BoundedSeries):
    """One integer by step. A value holds until the next one."""

    def __init__(self) -> None:
        super().__init__(MOST_POINTS, {"value": "q"}, aligned=False)

    @property
    def values(self) -> array[int]:
        values: array[int] = self.columns["value"]
        return values

    def add(self, step: int, value: int) -> None:
        # Values that do not fit come from a damaged record.
        if not max(abs(step), abs(value)) >> 62:
            self.add_row(step, {"value": value})

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.steps, self.values, strict=True)

    def at(self, step: float) -> int:
        return self.values[max(0, bisect_right(self.steps, step) - 1)]

    def median(self, first: float, last: float) -> float:
        """The median from step `first` to step `last`, from at most 101 of these steps."""
        count = int(min(101, max(1, last - first + 1)))
        distance = (last - first) / max(1, count - 1)
        return median(self.at(first + number * distance) for number in range(count))


def points_per_series(ranks: int) -> int:
    """Points of each series in a report that shows one per rank."""
    shared = _REPORT_POINTS_OF_ALL_RANKS // max(1, ranks)
    return max(MIN_REPORT_POINTS, min(MAX_REPORT_POINTS, shared))


def named_series(
    kind: SeriesKind, steps: Sequence[int], values: Sequence[float | None], max_points: int, of: str = ""
) -> NamedSeries | None:
    """The known values, downsampled; None if there are none."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    points = _downsampled(points, max_points)
    if not points:
        return None
    return NamedSeries(kind, [step for step, _ in points], [float(value) for _, value in points], of)


def _downsampled(points: list[tuple[int, float]], max_points: int) -> list[tuple[int, float]]:
    """Select by step, not by index, so that series of different ranks keep the same steps; and keep the last."""
    every = 1
    kept = points
    while len(kept) > max_points:
        every *= 2
        kept = [point for point in kept if point[0] % every == 0]
    if points and not kept:
        kept = points[:: -(-len(points) // max_points)]
    return kept if kept[-1:] == points[-1:] else [*kept, points[-1]]


def present(series: Iterable[NamedSeries | None]) -> tuple[NamedSeries, ...]:
    return tuple(each for each in series if each is not None)
