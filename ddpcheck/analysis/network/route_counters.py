"""What went from one address to another while the ranks stepped: kept sample by sample, however long the job was."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.analysis.hardware.statistics import NodeSample
from ddpcheck.analysis.network.model import Stretch

MOST_STRETCHES = 128
_MICRO = 1e-6


@dataclass
class RouteCounters:
    """Between the first and the last sample that told of it. Columns are those of `ddpcheck.sampling.tcp`."""

    began: float
    first: tuple[int, ...]
    ended: float
    last: tuple[int, ...]
    stretches: list[Stretch] = field(default_factory=list)
    # Samples that make a stretch, and those in the last one.
    _each: int = 1
    _taken: int = 0

    @property
    def bytes(self) -> int:
        return self.last[0] - self.first[0]

    @property
    def busy_seconds(self) -> float:
        return (self.last[1] - self.first[1]) * _MICRO

    @property
    def retransmits(self) -> int:
        return self.last[3] - self.first[3]

    @property
    def min_rtt(self) -> int:
        return self.last[4]

    def add(self, time: float, totals: tuple[int, ...]) -> None:
        if any(new < old for new, old in zip(totals[:4], self.last[:4], strict=True)):
            return  # counters never go back; a log of another's making may
        grown = totals[0] - self.last[0], (totals[1] - self.last[1]) * _MICRO
        self.ended, self.last = time, totals
        if self._taken and self.stretches:
            before = self.stretches.pop()
            grown = before[0] + grown[0], before[1] + grown[1]
        self.stretches.append(grown)
        self._taken = (self._taken + 1) % self._each
        if len(self.stretches) >= MOST_STRETCHES and not self._taken:
            self._halve()

    def _halve(self) -> None:
        pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
        self.stretches = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
        self._each *= 2


class RouteCounterTable(dict[str, RouteCounters]):
    """By "local remote"."""

    def add(self, sample: NodeSample) -> None:
        for name, totals in sample.connections.items():
            known = self.get(name)
            if known is None:
                self[name] = RouteCounters(sample.time, totals, sample.time, totals)
            else:
                known.add(sample.time, totals)
