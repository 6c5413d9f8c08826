"""Bounded series that collectors keep of each module or rank: agreement, gradient norms, loss."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.analysis.allreduce.mean_check import SketchTable
from ddpcheck.analysis.timeseries.model import AgreementInterval
from ddpcheck.analysis.timeseries.series import AggregatedSeries, BoundedSeries
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.modules import LossRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# Numbers kept for all ranks together, and points of each series within that.
MOST_NUMBERS = 24_000
MAX_NORM_POINTS = 1024
LEAST_POINTS = 16

# Keys of a point: ranks for their local norms, and these two.
REDUCED = -1
OFF_MEAN = -2
Point = dict[int, float]


class GradientSeries(AggregatedSeries[Point]):
    """Norms of local and reduced gradients, and the AllReduce error."""

    def __init__(self, ranks: int) -> None:
        super().__init__(max(LEAST_POINTS, min(MAX_NORM_POINTS, MOST_NUMBERS // (ranks + 2))), _maximum)

    def note(
        self, step: int, local: SketchTable, reduced: SketchTable | None, off_mean: float | None
    ) -> None:
        """Add one backward. Each rank sketches a share of the reduced gradients."""
        values = {rank: math.sqrt(square) for rank, square in local.squares().items() if square is not None}
        total = None if reduced is None else reduced.square()
        if total is not None:
            values[REDUCED] = math.sqrt(total)
        if off_mean is not None and math.isfinite(off_mean):
            values[OFF_MEAN] = off_mean
        self.add_value(step, values)


def _maximum(one: Point, other: Point) -> Point:
    return {**one, **{key: max(one.get(key, value), value) for key, value in other.items()}}


MOST_STEPS = 1024
_NOT_FINITE = ("nan", "inf", "-inf")


class LossSeries(BoundedSeries):
    """Losses by step; the same steps are kept on every rank."""

    def __init__(self) -> None:
        super().__init__(MOST_STEPS, {"value": "d"})

    @property
    def values(self) -> array[float]:
        values: array[float] = self.columns["value"]
        return values

    def add(self, record: LossRecord) -> None:
        for number, raw in enumerate(record.values):
            value = _value(raw)
            if value is not None:
                self.add_row(record.step + number, {"value": value})


def _value(raw: Any) -> float | None:
    """None if the rank could not read the loss, or the record is damaged."""
    if type(raw) in (int, float) or raw in _NOT_FINITE:
        return float(raw)
    return None


MOST_POINTS = 1024
# Leaves compared per step: if every rank of a thousand differs, some of them suffice.
MOST_LEAVES = 200_000
# Intervals kept, and ranks listed in all of them together.
MOST_INTERVALS = 2000
MOST_NAMED = 100_000


class DifferingSeries(AggregatedSeries[int]):
    """Number of differing parameters of one module. Of the steps of a point, the first that differs counts."""

    def __init__(self) -> None:
        super().__init__(MOST_POINTS, lambda one, other: one or other)

    def has_count(self, step: int) -> bool:
        return bool(self.points.get(step // self.every))

    def note(self, step: int, records: Sequence[DigestRecord]) -> None:
        # Step -1 is the wrapping. Counting is slow, so a point that has a count is not counted again.
        if step >= 0 and not self.has_count(step):
            self.add_value(step, differing(records))


def differing(records: Sequence[DigestRecord]) -> int:
    """Number of parameters that differ between ranks; at least 1 if the roots differ."""
    distinct = list({record.root: record for record in records}.values())
    if len(distinct) < 2:
        return 0
    first, *others = [unpack_leaves(record.leaves, record.width) for record in distinct]
    indices: set[int] = set()
    for leaves in others[: max(1, MOST_LEAVES // (len(first) + 1))]:
        indices |= {
            index for index, pair in enumerate(zip(first, leaves, strict=False)) if pair[0] != pair[1]
        }
        indices |= set(range(min(len(first), len(leaves)), max(len(first), len(leaves))))
    return max(1, len(indices))


@dataclass
class AgreementSeries:
    """Intervals of one module. Steps may be added in any order."""

    intervals: list[AgreementInterval] = field(default_factory=list)
    cut: bool = False
    # Number of differing parameters by step.
    differing: DifferingSeries = field(default_factory=DifferingSeries)
    _named: int = 0

    def note_agreement(self, steps: Sequence[int]) -> None:
        """Consecutive steps at which all ranks of the group reported the same."""
        for step in steps:
            self.differing.note(step, ())
        last = self.intervals[-1] if self.intervals else None
        if last and last.first >= 0 and last.last <= steps[0] and not last.odd and not last.absent:
            new = sum(step > last.last for step in steps)
            self.intervals[-1] = replace(last, last=steps[-1], compared=last.compared + new)
        elif len(self.intervals) >= MOST_INTERVALS or self._named > MOST_NAMED:
            self.cut = True
        else:
            self.intervals.append(AgreementInterval(steps[0], steps[-1], len(steps), (), (), True))

    def note_folded(self, first: int, last: int, count: int) -> None:
        """Steps at which all ranks agreed, of which only the number is known. Some steps between them were added."""
        before = self.intervals[-1] if self.intervals else None
        if before and before.first >= 0 and not before.odd and not before.absent:
            end, compared = max(before.last, last), before.compared + count
            self.intervals[-1] = replace(before, first=min(before.first, first), last=end, compared=compared)
        elif len(self.intervals) >= MOST_INTERVALS or self._named > MOST_NAMED:
            self.cut = True
        else:
            self.intervals.append(AgreementInterval(first, last, count, (), (), True))

    def note_difference(
        self,
        steps: Sequence[int],
        outliers: tuple[int, ...],
        digests: Callable[[int], Sequence[DigestRecord]],
    ) -> None:
        """Consecutive steps with the same outliers as the last one. `digests`: by position in `steps`."""
        for position, step in enumerate(steps):
            if not self.differing.has_count(step):
                self.differing.note(step, digests(position))
        last = self.intervals[-1] if self.intervals else None
        if last and (last.odd, last.absent) == (outliers, ()):
            new = sum(step > last.last for step in steps)
            self.intervals[-1] = replace(last, last=steps[-1], compared=last.compared + new)
        else:
            # There was no space for another interval.
            self.cut = True

    def note(self, step: int, group: tuple[int, ...], digests: Mapping[int, str]) -> None:
        """`digests` holds the parameter digest of each rank; ranks of the group that are not in it did not report."""
        outliers, majority = _outliers(digests)
        absent = tuple(rank for rank in group if rank not in digests)
        last = self.intervals[-1] if self.intervals else None
        # Step -1, the wrapping, is an interval of its own.
        if last and last.first >= 0 and last.last <= step and (last.odd, last.absent) == (outliers, absent):
            self.intervals[-1] = replace(last, last=step, compared=last.compared + (step > last.last))
            return
        if last and last.first <= step < last.last and (last.odd, last.absent) == (outliers, absent):
            # A step that was kept, among folded ones.
            self.intervals[-1] = replace(last, compared=last.compared + 1)
            return
        self._named += len(outliers) + len(absent)
        if len(self.intervals) >= MOST_INTERVALS or self._named > MOST_NAMED:
            self.cut = True
            return
        self.intervals.append(AgreementInterval(step, step, 1, outliers, absent, majority))


def _outliers(digests: Mapping[int, str]) -> tuple[tuple[int, ...], bool]:
    """Ranks outside the largest group, and whether it is a majority."""
    if len(set(digests.values())) == 1:
        return (), True
    counts: dict[str, int] = {}
    for root in digests.values():
        counts[root] = counts.get(root, 0) + 1
    largest = max(counts, key=lambda root: counts[root])
    if 2 * counts[largest] <= len(digests):
        return tuple(sorted(digests)), False
    return tuple(sorted(rank for rank, root in digests.items() if root != largest)), True


class LossCollector(Collector):
    """The loss by rank and optimizer."""

    def __init__(self, attempt: Attempt) -> None:
        self.series: dict[tuple[int, int], LossSeries] = {}

    @collects(LossRecord)
    def add(self, rank: RankData, record: LossRecord) -> None:
        self.series.setdefault((rank.number, record.optimizer), LossSeries()).add(record)
