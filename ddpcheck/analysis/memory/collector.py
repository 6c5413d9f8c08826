"""Collects the memory of each rank and detects steady growth."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.timeseries.series import Series
from ddpcheck.records.kinds.folds import FoldedRecord
from ddpcheck.records.kinds.memory import MemoryPartsRecord, MemoryRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# Growth is reported if memory grows steadily over at least this many steps, by at least this much.
LEAST_STEPS = 60
LEAST_TOTAL = 64 << 20
LEAST_SHARE = 0.05
LEAST_PER_STEP = 4 << 10
# The first steps are skipped: this share of all, and at least this many.
WARM_UP_SHARE, WARM_UP_STEPS = 0.2, 10
# The remaining steps are divided into this many intervals of equal length.
INTERVALS = 8
# Steady: each interval grows by at least this share of the mean growth, and the second half of the intervals by at
# least this share of the first half's growth.
LEAST_INTERVAL_GROWTH = 0.25
LEAST_LATE_GROWTH = 0.6
# Memory has levelled off if, in this last share of the steps, it grows by less than this share of the mean growth: a
# buffer that fills up.
LAST_SHARE = 0.1
LEAST_LAST_GROWTH = 0.25
# The level of memory is the median over this last share of the steps.
SETTLED_SHARE = 0.5


@dataclass(frozen=True)
class MemoryGrowth:
    """Steady growth of memory between two steps, in bytes."""

    first_step: int
    last_step: int
    first: int
    last: int

    @property
    def total(self) -> int:
        return self.last - self.first

    @property
    def per_step(self) -> float:
        return self.total / (self.last_step - self.first_step)


def growth_of(series: Series) -> MemoryGrowth | None:
    """None where memory does not grow, or not steadily."""
    if not len(series) or series.steps[-1] + 1 < LEAST_STEPS:
        return None
    end = series.steps[-1]
    begin = max(WARM_UP_STEPS, WARM_UP_SHARE * (end + 1))
    width = (end - begin) / INTERVALS
    levels = [
        series.median(begin + number * width, begin + (number + 1) * width) for number in range(INTERVALS)
    ]
    if not _is_steady(levels) or _levels_off(series, levels, begin, end):
        return None
    first, last = begin + width / 2, end - width / 2
    growth = MemoryGrowth(round(first), round(last), round(levels[0]), round(levels[-1]))
    enough = growth.total >= max(LEAST_TOTAL, LEAST_SHARE * levels[0]) and growth.per_step >= LEAST_PER_STEP
    return growth if enough else None


def _is_steady(levels: list[float]) -> bool:
    added = [after - before for before, after in pairwise(levels)]
    mean = sum(added) / len(added)
    half = len(added) // 2
    earlier, later = sum(added[:half]) / half, sum(added[-half:]) / half
    return mean > 0 and min(added) >= LEAST_INTERVAL_GROWTH * mean and later >= LEAST_LATE_GROWTH * earlier


def _levels_off(series: Series, levels: list[float], begin: float, end: int) -> bool:
    """Whether the growth has stopped shortly before the end. Intervals are too long to show it."""
    width = LAST_SHARE * (end - begin) / 2
    earlier, later = series.median(end - 2 * width, end - width), series.median(end - width, end)
    slope = (levels[-1] - levels[0]) / (end - begin) * INTERVALS / (INTERVALS - 1)
    return later - earlier < LEAST_LAST_GROWTH * slope * width


@dataclass
class RankMemory:
    """Memory of one rank: on its device if torch allocates there, otherwise of its process."""

    after: Series = field(default_factory=Series)
    high: Series = field(default_factory=Series)
    most: int = 0
    reserved: int = 0
    on_device: bool = False
    # The latest record by module and optimizer.
    parts: dict[tuple[ModuleKey, int], MemoryPartsRecord] = field(default_factory=dict)

    def add(self, record: MemoryRecord) -> None:
        self.on_device = self.on_device or record.allocated > 0
        after = record.allocated if self.on_device else record.host
        high = record.peak if self.on_device else max(record.high, 0)
        self.after.add(record.step, after)
        if high:
            self.high.add(record.step, high)
        self.most = max(self.most, after, high)
        self.reserved = max(self.reserved, record.reserved)

    def add_folded(self, record: FoldedRecord) -> None:
        """The largest values, and the mean in the middle of these steps."""
        self.on_device = self.on_device or record.largest("allocated") > 0
        after, high = ("allocated", "peak") if self.on_device else ("host", "high")
        count, total, _, largest = record.numbers.get(after, (0, 0, 0, 0))
        if count:
            self.after.add((record.first + record.last) // 2, round(total / count))
        self.most = max(self.most, round(largest), round(record.largest(high)))
        self.reserved = max(self.reserved, round(record.largest("reserved")))

    @property
    def steps(self) -> int:
        return self.after.steps[-1] + 1 if len(self.after) else 0

    @property
    def level(self) -> int:
        """Memory after a step, in the steady state."""
        return self._settled(self.after)

    @property
    def level_in_backward(self) -> int:
        """Memory when the backward begins, in the steady state; on a device, the peak of all steps."""
        return self.most if self.on_device else self._settled(self.high)

    def growth(self) -> MemoryGrowth | None:
        return growth_of(self.after)

    def part(self, name: str) -> int:
        """Bytes of one part, summed over modules, which do not share tensors."""
        newest: dict[ModuleKey, dict[int, int]] = {}
        for (module, optimizer), record in self.parts.items():
            newest.setdefault(module, {})[optimizer] = getattr(record, name)
        # Each optimizer has its own state. The tensors of the module are counted in the record of every optimizer.
        combine = sum if name == "state" else max
        return sum(combine(by_optimizer.values()) for by_optimizer in newest.values())

    @property
    def base(self) -> int:
        """Memory before the first module was wrapped."""
        return min((record.base for record in self.parts.values()), default=0)

    @property
    def views(self) -> bool:
        return any(record.views for record in self.parts.values())

    @property
    def device(self) -> str:
        return next((record.device for record in self.parts.values()), "cpu")

    def elsewhere(self) -> dict[str, int]:
        """Memory on other devices than its own, by device."""
        devices: dict[str, int] = {}
        for record in self.parts.values():
            devices.update(record.elsewhere)
        return devices

    def _settled(self, series: Series) -> int:
        if not len(series):
            return 0
        end = series.steps[-1]
        return round(series.median(end - SETTLED_SHARE * (end - series.steps[0]), end))


class MemoryCollector(Collector):
    """Memory of all ranks."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: dict[int, RankMemory] = {}

    @collects(MemoryRecord)
    def add_step(self, rank: RankData, record: MemoryRecord) -> None:
        self._of(rank).add(record)

    @collects(FoldedRecord)
    def add_folded(self, rank: RankData, record: FoldedRecord) -> None:
        if record.of == MemoryRecord.kind:
            self._of(rank).add_folded(record)

    @collects_per_module(MemoryPartsRecord)
    def add_parts(self, rank: RankData, module: ModuleKey, record: MemoryPartsRecord) -> None:
        self._of(rank).parts[module, record.optimizer] = record

    def _of(self, rank: RankData) -> RankMemory:
        memory = self.ranks.get(rank.number)
        if memory is None:
            memory = self.ranks[rank.number] = RankMemory()
        return memory
