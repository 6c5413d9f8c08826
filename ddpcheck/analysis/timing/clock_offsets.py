"""Clock offsets between the hosts of a job, from events that end on all ranks at the same time.

A reduced backward ends on all ranks at about the same time: no rank has the sum before all have contributed. The median
over many such ends is the clock offset between two hosts. Its uncertainty depends on the spread of single ends, and on
how far apart the true ends can be: at most the shortest wait for communication of any rank, because that wait began
before any rank could end. Over a slow link this bound is large, and the same in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.rank import RankHeader

# Events that wait for records of other hosts, and differences kept for each host.
_MOST_OPEN = 1024
_MOST_KEPT = 2048
# The first backwards are skipped: they wait for compilers, allocators and data.
_WARM_UP = 2
_FEWEST = 3
# Median absolute deviation to standard deviation, for a normal distribution.
_TO_DEVIATION = 1.4826


@dataclass(frozen=True)
class HostClock:
    """Clock offset of a host from rank 0's host, positive if ahead."""

    host: str
    ranks: tuple[int, ...]
    # Seconds; None: too few common events.
    offset: float | None
    uncertainty: float | None
    # Number of events.
    moments: int
    reference: bool = False
    # Whether its records are in this run folder.
    here: bool = True


class ClockOffsets:
    """Collects records; memory does not grow with steps."""

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}
        self._open: OrderedDict[tuple[ModuleKey, int], dict[str, float]] = OrderedDict()
        # By host, against that of the lowest rank.
        self._differences: dict[str, list[float]] = {}
        # Events are downsampled evenly over the whole job.
        self._stride = 1
        self._closed = 0

    def add(self, header: RankHeader, module: ModuleKey, record: BackwardRecord) -> None:
        self._hosts[header.rank] = header.host
        if record.time <= 0 or record.number <= _WARM_UP:
            return
        times = self._open.setdefault((module, record.number), {})
        # A rank sees the end when it is scheduled again: the earliest of a host is the most precise.
        times[header.host] = min(times.get(header.host, record.time), record.time)
        if len(self._open) > _MOST_OPEN:
            self._close()

    def hosts(
        self,
        here: Mapping[int, str],
        elsewhere: Mapping[int, str],
        waits: Mapping[int, float] | None = None,
    ) -> tuple[HostClock, ...]:
        """All hosts, that of the lowest rank first; nothing where there is only one. All by rank.

        `waits`: the shortest wait for communication that each rank ever had, in seconds.
        """
        while self._open:
            self._close()
        names = _by_host(here)
        away = _by_host({rank: host for rank, host in elsewhere.items() if rank not in here})
        shortest = _shortest(names, waits or {})
        first = shortest.get(here[min(here)], 0.0) if here else 0.0
        clocks = [
            self._clock(name, ranks, min(here), max(first, shortest.get(name, 0.0)))
            for name, ranks in names.items()
        ]
        clocks += [HostClock(name, ranks, None, None, 0, here=False) for name, ranks in away.items()]
        return tuple(clocks) if len(clocks) > 1 else ()

    def _close(self) -> None:
        """Close the oldest open event: ranks that have not reported it yet will not."""
        times = self._open.popitem(last=False)[1]
        reference = times.pop(self._hosts[min(self._hosts)], None)
        self._closed += 1
        if reference is None or not times or self._closed % self._stride:
            return
        for host, time in times.items():
            self._differences.setdefault(host, []).append(time - reference)
        if max(map(len, self._differences.values())) > _MOST_KEPT:
            self._stride *= 2
            for kept in self._differences.values():
                del kept[::2]

    def _clock(self, host: str, ranks: tuple[int, ...], lowest: int, largest_skew: float) -> HostClock:
        if lowest in ranks:
            return HostClock(host, ranks, 0.0, 0.0, 0, reference=True)
        differences = self._differences.get(host, [])
        if len(differences) < _FEWEST:
            return HostClock(host, ranks, None, None, len(differences))
        middle = median(differences)
        # Not divided by the square root of the count: one host may always end a little later than another. This
        # error is systematic, and more events do not reduce it.
        deviation = _TO_DEVIATION * median(abs(each - middle) for each in differences)
        return HostClock(
            host, ranks, round(middle, 6), round(max(deviation, largest_skew), 6), len(differences)
        )


def _shortest(hosts: Mapping[str, tuple[int, ...]], waits: Mapping[int, float]) -> dict[str, float]:
    known = {host: [waits[rank] for rank in ranks if rank in waits] for host, ranks in hosts.items()}
    return {host: min(each) for host, each in known.items() if each}


def _by_host(ranks: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    hosts: dict[str, tuple[int, ...]] = {}
    for rank in sorted(ranks):
        hosts[ranks[rank]] = (*hosts.get(ranks[rank], ()), rank)
    return hosts
