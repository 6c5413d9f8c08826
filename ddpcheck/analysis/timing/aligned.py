"""Step times of all ranks aligned: the same steps of each, without warm-up and pauses."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.timing.rank_series import BUSY, COLUMNS, StepTimeSeries

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
