"""What ranks said of their memory, fed record by record."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.analysis.memory.checks import Growth, growth_of
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.timeseries.series import Series
from ddpcheck.records.schema import MemoryPartsRecord, MemoryRecord

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

    def growth(self) -> Growth | None:
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


class MemorySeen:
    """All ranks of an attempt."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMemory] = {}

    def step(self, rank: int, record: MemoryRecord) -> None:
        self.ranks.setdefault(rank, RankMemory()).add(record)

    def parts(self, rank: int, module: ModuleKey, record: MemoryPartsRecord) -> None:
        self.ranks.setdefault(rank, RankMemory()).parts[module, record.optimizer] = record
