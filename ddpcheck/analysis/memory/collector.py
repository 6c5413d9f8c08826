"""What ranks said of their memory, fed record by record."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.timeseries.series import Series
from ddpcheck.records.schema import MemoryPartsRecord, MemoryRecord

LEAST_STEPS = 60
# Left out at the beginning: this share, and no fewer than this many steps.
WARM_UP_SHARE, WARM_UP_STEPS = 0.2, 10
STRETCHES = 8
LEAST_TOTAL = 64 << 20
LEAST_SHARE = 0.05
LEAST_A_STEP = 4 << 10
# Each stretch must add this share of what stretches add on average, and the second half of the first's.
STEADY = 0.25
NOT_SLOWING = 0.6


@dataclass(frozen=True)
class MemoryGrowth:
    """From one step to another."""

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
    """None where it is not sure."""
    if not len(series) or series.steps[-1] + 1 < LEAST_STEPS:
        return None
    end = series.steps[-1]
    begin = max(WARM_UP_STEPS, WARM_UP_SHARE * (end + 1))
    width = (end - begin) / STRETCHES
    levels = [
        series.median(begin + number * width, begin + (number + 1) * width) for number in range(STRETCHES)
    ]
    if not _steady(levels):
        return None
    first, last = begin + width / 2, end - width / 2
    growth = MemoryGrowth(round(first), round(last), round(levels[0]), round(levels[-1]))
    enough = growth.total >= max(LEAST_TOTAL, LEAST_SHARE * levels[0]) and growth.per_step >= LEAST_A_STEP
    return growth if enough else None


def _steady(levels: list[float]) -> bool:
    added = [after - before for before, after in pairwise(levels)]
    mean = sum(added) / len(added)
    half = len(added) // 2
    earlier, later = sum(added[:half]) / half, sum(added[-half:]) / half
    return mean > 0 and min(added) >= STEADY * mean and later >= NOT_SLOWING * earlier


# What is held after the last so much of a job's steps is what it holds.
SETTLED = 0.5


@dataclass
class RankMemory:
    """One rank's."""

    after: Series = field(default_factory=Series)
    high: Series = field(default_factory=Series)
    most: int = 0
    reserved: int = 0
    on_device: bool = False
    # The latest, by module and optimizer.
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

    @property
    def steps(self) -> int:
        return self.after.steps[-1] + 1 if len(self.after) else 0

    @property
    def level(self) -> int:
        """What it holds after a step, once it has settled."""
        return self._settled(self.after)

    @property
    def level_in_backward(self) -> int:
        """What it holds as the backward begins; on a device, the most of any step."""
        return self.most if self.on_device else self._settled(self.high)

    def growth(self) -> MemoryGrowth | None:
        return growth_of(self.after)

    def part(self, name: str) -> int:
        """Bytes of one part, over all modules: tensors of one belong to no other."""
        newest: dict[ModuleKey, dict[int, int]] = {}
        for (module, optimizer), record in self.parts.items():
            newest.setdefault(module, {})[optimizer] = getattr(record, name)
        # Optimizers of one module each hold a state of their own; the module's tensors are all there for each.
        together = sum if name == "state" else max
        return sum(together(by_optimizer.values()) for by_optimizer in newest.values())

    @property
    def base(self) -> int:
        """What was there before anything was wrapped."""
        return min((record.base for record in self.parts.values()), default=0)

    @property
    def views(self) -> bool:
        return any(record.views for record in self.parts.values())

    @property
    def device(self) -> str:
        return next((record.device for record in self.parts.values()), "cpu")

    def elsewhere(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for record in self.parts.values():
            found.update(record.elsewhere)
        return found

    def _settled(self, series: Series) -> int:
        if not len(series):
            return 0
        end = series.steps[-1]
        return round(series.median(end - SETTLED * (end - series.steps[0]), end))


class MemoryCollector:
    """All ranks of an attempt."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMemory] = {}

    def step(self, rank: int, record: MemoryRecord) -> None:
        self.ranks.setdefault(rank, RankMemory()).add(record)

    def parts(self, rank: int, module: ModuleKey, record: MemoryPartsRecord) -> None:
        self.ranks.setdefault(rank, RankMemory()).parts[module, record.optimizer] = record
