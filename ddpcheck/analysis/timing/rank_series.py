"""Step times of one rank: the phases of each step, downsampled."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.timeseries.series import BoundedSeries
from ddpcheck.records.kinds.timing import ClockRecord

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
        for number, row in enumerate(_rows(record)):
            if row is not None:
                self.add_row(record.step + number, row)
        self.device = self.device or bool(record.device)

    def shortest_wait(self) -> float | None:
        """The shortest wait for communication in seconds; steps without communication do not count."""
        shortest = min((wait for wait in self.columns["wait"] if wait > 0), default=None)
        return None if shortest is None else shortest / 1e6


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
