"""TCP counters between two addresses during the steps, summed over intervals of samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.analysis.hardware.statistics import NodeSample
from ddpcheck.analysis.network.model import Stretch
from ddpcheck.analysis.timeseries.series import AggregatedSeries

MOST_INTERVALS = 128
_MICRO = 1e-6


@dataclass
class RouteCounters:
    """Counters from the first to the last sample of a route. Columns are those of `ddpcheck.sampling.tcp`."""

    began: float
    first: tuple[int, ...]
    ended: float
    last: tuple[int, ...]
    _series: AggregatedSeries[Stretch] = field(
        default_factory=lambda: AggregatedSeries(MOST_INTERVALS - 1, _sum)
    )
    _count: int = 0

    @property
    def intervals(self) -> list[Stretch]:
        """Bytes sent and busy seconds of each interval."""
        return [self._series.points[number] for number in sorted(self._series.points)]

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
            return  # counters never decrease, except in a damaged log
        sent, busy = totals[0] - self.last[0], (totals[1] - self.last[1]) * _MICRO
        self.ended, self.last = time, totals
        self._series.add_value(self._count, (sent, busy))
        self._count += 1


def _sum(one: Stretch, other: Stretch) -> Stretch:
    return one[0] + other[0], one[1] + other[1]


class RouteCounterTable(dict[str, RouteCounters]):
    """Counters by "local remote" address pair."""

    def add(self, sample: NodeSample) -> None:
        for name, totals in sample.connections.items():
            known = self.get(name)
            if known is None:
                self[name] = RouteCounters(sample.time, totals, sample.time, totals)
            else:
                known.add(sample.time, totals)
