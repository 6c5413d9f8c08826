"""The clocks of all ranks side by side: the same steps of each, without warm-up and pauses."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.timing.rank_series import BUSY, COLUMNS, StepTimeSeries

# Steps at the beginning that are left out: memory is touched, buckets are rebuilt, workers start.
WARM_UP = 5
# Fewer steps tell nothing.
LEAST_STEPS = 20
# A step that took so many times as long as the others holds a pause: an evaluation, a checkpoint.
PAUSE = 3.0


@dataclass(frozen=True)
class AlignedSteps:
    """Columns by rank, in microseconds, one number for each of `steps`."""

    steps: tuple[int, ...]
    columns: Mapping[int, Mapping[str, Sequence[int]]]
    # Steps that were left out as pauses.
    pauses: int
    every: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.columns)

    def mean(self, rank: int, part: str) -> float:
        return sum(self.columns[rank][part]) / len(self.steps)

    def busy(self, rank: int) -> list[int]:
        """All but waiting, step by step."""
        return [sum(parts) for parts in zip(*(self.columns[rank][name] for name in BUSY), strict=True)]

    def shortest_waits(self) -> list[int]:
        """What communication itself took, step by step: who came last had nobody to wait for."""
        return [min(waits) for waits in zip(*(self.columns[r]["wait"] for r in self.ranks), strict=True)]

    def last_arrivals(self) -> dict[int, int]:
        """How often each rank came last: those who waited least."""
        counts = dict.fromkeys(self.ranks, 0)
        waits = [self.columns[rank]["wait"] for rank in self.ranks]
        for step in range(len(self.steps)):
            counts[min(zip(self.ranks, waits, strict=True), key=lambda pair: pair[1][step])[0]] += 1
        return counts


def align_steps(clocks: Mapping[int, StepTimeSeries]) -> AlignedSteps | None:
    """None where there are too few steps that all ranks have."""
    every = max(clock.every for clock in clocks.values())
    places = {rank: _places(clock, every) for rank, clock in clocks.items()}
    common = sorted(set.intersection(*(set(steps) for steps in places.values())))
    common = [step for step in common if step >= WARM_UP]
    if len(common) < LEAST_STEPS:
        return None

    def column(rank: int, name: str, steps: Sequence[int]) -> array[int]:
        held = clocks[rank].columns[name]
        return array("q", [held[places[rank][step]] for step in steps])

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


def _places(clock: StepTimeSeries, every: int) -> dict[int, int]:
    return {step: place for place, step in enumerate(clock.steps) if step % every == 0}


def _without_pauses(steps: Sequence[int], totals: Sequence[Sequence[int]]) -> list[int]:
    longest = [max(ranks) for ranks in zip(*totals, strict=True)]
    limit = PAUSE * median(longest)
    return [step for step, took in zip(steps, longest, strict=True) if took <= limit]
