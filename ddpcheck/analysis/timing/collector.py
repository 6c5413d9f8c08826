"""Collects step times of the ranks by phase, and the clock offsets between their hosts."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.timeseries.series import BoundedSeries
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.kinds.timing import ClockRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.step_columns import Stream
    from ddpcheck.analysis.aggregate.step_window import Window

# Steps that are kept of each rank.
MOST_STEPS, FEWEST_STEPS = 2048, 256
# Steps that are kept of all ranks together.
_STEPS_OF_ALL = 1 << 20

# Phases of a step, in the order of a bar. `wait` is for communication, `other` is not measured directly.
PARTS = ("data", "forward", "backward", "optimizer", "other", "wait")
BUSY = PARTS[:-1]
COLUMNS = (*PARTS, "total", "watching", "queued", "faults", "kernel")


class StepTimeSeries(BoundedSeries):
    """Microseconds by phase, and page faults. The same steps are kept on every rank."""

    def __init__(self, limit: int = MOST_STEPS) -> None:
        super().__init__(limit, dict.fromkeys(COLUMNS, "q"))
        self.columns: dict[str, array[int]]
        # Whether the phases were measured on a device.
        self.device = False
        # Statistics of DDP's own logger.
        self.ddp: dict[str, int] = {}

    @classmethod
    def one_of(cls, ranks: int) -> StepTimeSeries:
        return cls(max(FEWEST_STEPS, min(MOST_STEPS, _STEPS_OF_ALL // max(1, ranks))))

    def add(self, record: ClockRecord) -> None:
        if record.ddp:
            self.ddp = record.ddp
        if not record.total:
            return
        columns = _host_columns(record)
        if columns is not None:
            self.add_rows(range(record.step, record.step + len(record.total)), columns)
            return
        for number, row in enumerate(_rows(record)):
            if row is not None:
                self.add_row(record.step + number, row)
        self.device = self.device or bool(record.device)

    def shortest_wait(self) -> float | None:
        """The shortest wait for communication in seconds; steps without communication do not count."""
        shortest = min((wait for wait in self.columns["wait"] if wait > 0), default=None)
        return None if shortest is None else shortest / 1e6


def _host_columns(record: ClockRecord) -> dict[str, list[int]] | None:
    """The columns of `_rows`; None for times of a device, and where a row is missing."""
    parts = {name: getattr(record, name) for name in ("forward", "backward", "wait", "optimizer")}
    length = len(record.total)
    if record.device or any(
        len(column) != length for column in (*parts.values(), record.data, record.watching, record.queued)
    ):
        return None
    if any(len(column) not in (0, length) for column in (record.faults, record.kernel)):
        return None
    if min(record.total) <= 0 or min(map(min, parts.values())) < 0:
        return None
    rest = [
        max(0, total - busy)
        for total, busy in zip(record.total, map(sum, zip(*parts.values(), strict=True)), strict=True)
    ]
    data = list(map(min, record.data, rest))
    return {
        **parts,
        "data": data,
        "other": [left - waited for left, waited in zip(rest, data, strict=True)],
        "total": record.total,
        "watching": record.watching,
        "queued": record.queued,
        "faults": record.faults or [-1] * length,
        "kernel": record.kernel or [-1] * length,
    }


def _rows(record: ClockRecord) -> list[dict[str, int] | None]:
    """The phases of each step; None if its columns are inconsistent or its device times are missing."""
    host = [record.data, record.forward, record.backward, record.wait, record.optimizer]
    length = len(record.total)
    if any(len(column) != length for column in (*host, record.watching, record.queued)):
        return [None] * length
    # Records of earlier versions do not have these columns.
    if any(len(column) not in (0, length) for column in (record.faults, record.kernel)):
        return [None] * length
    device = record.device
    if any(len(column) != length for column in device.values()):
        return [None] * length
    return [
        _row(record, index, {name: column[index] for name, column in device.items()})
        for index in range(length)
    ]


def _row(record: ClockRecord, index: int, device: dict[str, int]) -> dict[str, int] | None:
    """Device times are used if there are any, because the host runs ahead; data time is always the host's."""
    total = record.total[index] if not device else device.get("total", -1)
    parts = {
        name: getattr(record, name)[index] if not device else device.get(name, -1)
        for name in ("forward", "backward", "wait", "optimizer")
    }
    if total <= 0 or min(parts.values()) < 0:
        return None
    rest = max(0, total - sum(parts.values()))
    data = min(record.data[index], rest)
    return {
        **parts,
        "data": data,
        "other": rest - data,
        "total": total,
        # On a device, ddpcheck's own work may overlap with queued kernels.
        "watching": record.watching[index],
        "queued": record.queued[index],
        "faults": record.faults[index] if record.faults else -1,
        "kernel": record.kernel[index] if record.kernel else -1,
    }


# Warm-up steps that are excluded: memory is touched, buckets are rebuilt, workers start.
WARM_UP = 5
# Minimum number of steps.
LEAST_STEPS = 20
# A step this many times longer than the median has a pause, such as an evaluation or a checkpoint.
PAUSE = 3.0


@dataclass(frozen=True)
class AlignedSteps:
    """Columns by rank, in microseconds, one number for each of `steps`."""

    steps: tuple[int, ...]
    columns: Mapping[int, Mapping[str, Sequence[int]]]
    # Number of steps excluded as pauses.
    pauses: int
    every: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.columns)

    def mean(self, rank: int, part: str) -> float:
        return sum(self.columns[rank][part]) / len(self.steps)

    def busy(self, rank: int) -> list[int]:
        """Busy time by step: everything but waiting."""
        return [sum(parts) for parts in zip(*(self.columns[rank][name] for name in BUSY), strict=True)]

    def shortest_waits(self) -> list[int]:
        """Communication time by step: the wait of the rank that arrived last."""
        return [min(waits) for waits in zip(*(self.columns[r]["wait"] for r in self.ranks), strict=True)]

    def last_arrivals(self) -> dict[int, int]:
        """How often each rank arrived last, that is, waited least."""
        counts = dict.fromkeys(self.ranks, 0)
        waits = [self.columns[rank]["wait"] for rank in self.ranks]
        for step in range(len(self.steps)):
            counts[min(zip(self.ranks, waits, strict=True), key=lambda pair: pair[1][step])[0]] += 1
        return counts


def align_steps(clocks: Mapping[int, StepTimeSeries]) -> AlignedSteps | None:
    """None if there are too few common steps."""
    every = max(clock.every for clock in clocks.values())
    indices = {rank: _indices(clock, every) for rank, clock in clocks.items()}
    common = sorted(set.intersection(*(set(steps) for steps in indices.values())))
    common = [step for step in common if step >= WARM_UP]
    if len(common) < LEAST_STEPS:
        return None

    def column(rank: int, name: str, steps: Sequence[int]) -> array[int]:
        held = clocks[rank].columns[name]
        return array("q", [held[indices[rank][step]] for step in steps])

    steps = _without_pauses(common, [column(rank, "total", common) for rank in clocks])
    if len(steps) < LEAST_STEPS:
        return None
    return AlignedSteps(
        steps=tuple(steps),
        columns=_columns(sorted(clocks), steps, column),
        pauses=len(common) - len(steps),
        every=every,
    )


def _columns(
    ranks: Sequence[int], steps: Sequence[int], column: Callable[[int, str, Sequence[int]], array[int]]
) -> dict[int, dict[str, array[int]]]:
    return {rank: {name: column(rank, name, steps) for name in COLUMNS} for rank in ranks}


def _indices(clock: StepTimeSeries, every: int) -> dict[int, int]:
    return {step: index for index, step in enumerate(clock.steps) if step % every == 0}


def _without_pauses(steps: Sequence[int], totals: Sequence[Sequence[int]]) -> list[int]:
    longest = [max(ranks) for ranks in zip(*totals, strict=True)]
    limit = PAUSE * median(longest)
    return [step for step, took in zip(steps, longest, strict=True) if took <= limit]


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
    """Clock offsets between hosts, from events that end on all ranks at the same time; memory does not grow with steps.

    A reduced backward ends on all ranks at about the same time: no rank has the sum before all have contributed. The
    median over many such ends is the clock offset between two hosts. Its uncertainty depends on the spread of single
    ends, and on how far apart the true ends can be: at most the shortest wait for communication of any rank, because
    that wait began before any rank could end. Over a slow link this bound is large, and the same in every step.
    """

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

    def add_window(self, stream: Stream) -> None:
        """The same for the backwards of a window."""
        import numpy as np

        hosts: dict[str, list[int]] = {}
        for index, rank in enumerate(stream.ranks):
            self._hosts[rank.number] = rank.header.host
            hosts.setdefault(rank.header.host, []).append(index)
        numbers = stream.integers("number")[0]
        known = stream.floats("time")
        known = np.where(known > 0, known, np.inf)
        timed = np.flatnonzero((numbers > _WARM_UP) & np.isfinite(known).any(axis=0))
        earliest = {host: known[ranks][:, timed].min(axis=0).tolist() for host, ranks in hosts.items()}
        for position, number in enumerate(numbers[timed].tolist()):
            times = self._open.setdefault((stream.module, number), {})
            for host, values in earliest.items():
                if math.isfinite(values[position]):
                    times[host] = min(times.get(host, values[position]), values[position])
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


class StepTimeCollector(Collector):
    """Step times by rank."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: dict[int, StepTimeSeries] = {}

    @collects(ClockRecord)
    def add(self, rank: RankData, record: ClockRecord) -> None:
        series = self.ranks.get(rank.number)
        if series is None:
            series = self.ranks[rank.number] = StepTimeSeries.one_of(rank.header.world_size)
        series.add(record)


class ClockOffsetCollector(Collector):
    """Ends of reduced backwards by host."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.offsets = ClockOffsets()

    def add_window(self, window: Window) -> None:
        for stream in window.of(BackwardRecord):
            self.offsets.add_window(stream)

    @collects_per_module(BackwardRecord)
    def add(self, rank: RankData, module: ModuleKey, record: BackwardRecord) -> None:
        self.offsets.add(rank.header, module, record)
