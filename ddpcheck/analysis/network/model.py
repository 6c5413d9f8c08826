"""Links between nodes: their counters, what a slow one costs a step, and the counters of each route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpcheck.analysis.hardware.statistics import NodeSample
from ddpcheck.analysis.timeseries.series import AggregatedSeries
from ddpcheck.analysis.timing.model import TimeTable

# The kernel counts busy time in ticks of its clock.
_TICK = 0.004

# Bytes sent and busy seconds of an interval of samples.
Stretch = tuple[int, float]


@dataclass(frozen=True)
class NodeLink:
    """From an address of one node to one of another, over all connections between them."""

    source: str
    target: str
    bytes: int
    busy_seconds: float
    # Duration of the measurement.
    seconds: float
    stretches: tuple[Stretch, ...] = ()
    source_address: str = ""
    target_address: str = ""
    # Steps in that time; None if the sender's ranks took none.
    steps: float | None = None
    retransmits: int = 0
    # Minimum round-trip time in microseconds.
    min_rtt: int = 0

    @property
    def bandwidth(self) -> float:
        """Throughput while busy, in bytes per second."""
        return self.bytes / max(self.busy_seconds, _TICK)

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def ends(self) -> tuple[str, str]:
        return self.source, self.target

    @property
    def addresses(self) -> tuple[str, str]:
        return self.source_address, self.target_address


@dataclass(frozen=True)
class SlowLink:
    """`nodes`: the one node whose links are all slow, or both ends of the one link that is."""

    nodes: tuple[str, ...]
    links: tuple[NodeLink, ...]
    # Throughput while busy in bytes per second: of the slow links, and of the others.
    bandwidth: float
    usual: float
    # Address of the slow interface, if the node has several and only this one is slow.
    address: str = ""

    @property
    def factor(self) -> float:
        return self.usual / self.bandwidth

    @property
    def worst(self) -> NodeLink:
        """The link that loses the most time: the others of a ring wait for it."""
        return max(self.links, key=self._lost)

    def seconds_lost(self) -> float:
        """Total time lost compared with the other links."""
        return self._lost(self.worst)

    def seconds_lost_a_step(self) -> float | None:
        steps = self.worst.steps
        return self.seconds_lost() / steps if steps else None

    def _lost(self, link: NodeLink) -> float:
        return link.busy_seconds - link.bytes / self.usual


@dataclass(frozen=True)
class Cost:
    """Cost and duration of a step in microseconds."""

    cost_us: int
    step_us: int

    @property
    def share(self) -> float:
        return self.cost_us / self.step_us


def cost_of(slow: SlowLink, tables: Sequence[TimeTable]) -> Cost | None:
    """The additional time of the slow link that is exposed.

    Transfers that overlap with the backward cost nothing. None if step times were not recorded.
    """
    lost = slow.seconds_lost_a_step()
    if lost is None or not tables:
        return None
    waiting = max(tables, key=lambda table: table.scaling.exposed_communication * table.step_us)
    exposed = waiting.scaling.exposed_communication * waiting.step_us
    return Cost(round(max(0.0, min(lost * 1e6, exposed))), max(1, waiting.step_us))


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
