"""Two runs side by side in speed: step time by phase, communication, memory and throughput, and what of it is noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hardware.machine import machine_of
from ddpcheck.analysis.memory.table import memory_table
from ddpcheck.analysis.network.connections import links_table
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.analysis.timing.collector import AlignedSteps, align_steps
from ddpcheck.analysis.timing.table import time_tables

# Each run is cut into this many intervals: the range of their medians is its noise. Fewer steps say too little.
INTERVALS = 8
LEAST_STEPS = 32
# A smaller change is not worth a line, and a quantity without intervals changes only beyond the second one.
LEAST_CHANGE = 0.01
LEAST_CHANGE_OF_ONE_VALUE = 0.05
STEP_TIME, PEAK_MEMORY = "step time", "peak memory"
_PHASES = ("data", "forward", "backward", "optimizer", "other")


class SpeedUnit(str, Enum):
    """The unit of a quantity."""

    MICROSECONDS = "us"
    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes/s"


class SpeedOutcome(str, Enum):
    """What B is, compared with A."""

    BETTER = "better"
    WORSE = "worse"
    NOISE = "within noise"
    # Measured in one run only, or in none.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Measured:
    """A quantity of one run: its median, and the range of the medians of its intervals."""

    value: float
    low: float
    high: float

    @property
    def is_range(self) -> bool:
        return self.low < self.high


@dataclass(frozen=True)
class SpeedFigure:
    """One quantity in both runs."""

    what: str
    unit: SpeedUnit
    a: Measured | None
    b: Measured | None
    # B / A - 1; None where it is unknown, or A is 0.
    change: float | None
    outcome: SpeedOutcome


def compare_speed(
    path_a: Path, path_b: Path, attempts: tuple[int | None, int | None] = (None, None)
) -> tuple[SpeedFigure, ...]:
    """All quantities that one of the runs has."""
    a, b = _figures_of(path_a, attempts[0]), _figures_of(path_b, attempts[1])
    names = list(dict.fromkeys([*a, *b]))
    return tuple(_figure(name, a.get(name), b.get(name)) for name in names)


def regressions(speed: Sequence[SpeedFigure], percent: float) -> list[SpeedFigure] | None:
    """Step time and peak memory that got worse by more than `percent`; None if the step time is not known."""
    watched = {figure.what: figure for figure in speed if figure.what in (STEP_TIME, PEAK_MEMORY)}
    step = watched.get(STEP_TIME)
    if step is None or step.outcome is SpeedOutcome.UNKNOWN:
        return None
    return [
        figure
        for figure in watched.values()
        if figure.outcome is SpeedOutcome.WORSE
        and figure.change is not None
        and 100 * figure.change > percent
    ]


def _figure(name: str, a: Measured | None, b: Measured | None) -> SpeedFigure:
    unit = _UNITS.get(name, SpeedUnit.MICROSECONDS)
    change = None if a is None or b is None or a.value <= 0 else b.value / a.value - 1
    return SpeedFigure(name, unit, a, b, change, _outcome(unit, a, b, change))


_LINKS = "link throughput"
_UNITS = {PEAK_MEMORY: SpeedUnit.BYTES, _LINKS: SpeedUnit.BYTES_PER_SECOND}


def _outcome(unit: SpeedUnit, a: Measured | None, b: Measured | None, change: float | None) -> SpeedOutcome:
    if a is None or b is None:
        return SpeedOutcome.UNKNOWN
    ranges = a.is_range or b.is_range
    least = LEAST_CHANGE if ranges else LEAST_CHANGE_OF_ONE_VALUE
    overlap = a.low <= b.high and b.low <= a.high
    if (overlap and ranges) or (change is not None and abs(change) < least) or a.value == b.value:
        return SpeedOutcome.NOISE
    more_is_better = unit is SpeedUnit.BYTES_PER_SECOND
    return SpeedOutcome.BETTER if (b.value > a.value) is more_is_better else SpeedOutcome.WORSE


def _figures_of(path: Path, number: int | None) -> dict[str, Measured]:
    run = RunReader(path)
    run.finish()
    attempts = run.ordered()
    if not attempts or (number or 0) >= len(attempts):
        return {}
    attempt = attempts[-1 if number is None else number]
    figures = dict(_times(attempt))
    memory = memory_table(attempt)
    if memory is not None and memory["ranks"]:
        peak = float(max(row["most"] for row in memory["ranks"]))
        figures[PEAK_MEMORY] = Measured(peak, peak, peak)
    figures.update(_link_throughput(path, attempt))
    return figures


def _link_throughput(path: Path, attempt: Attempt) -> Mapping[str, Measured]:
    groups = [module[0] for module in attempt.modules()]
    usual = links_table(machine_of(path, attempt).links, time_tables(attempt.step_times, groups)).get("usual")
    return {_LINKS: Measured(float(usual), float(usual), float(usual))} if usual else {}


def _times(attempt: Attempt) -> Mapping[str, Measured]:
    """Of the largest group of ranks that synchronise; empty if too few steps were measured."""
    groups = [module[0] for module in attempt.modules()]
    complete = [group for group in groups if all(rank in attempt.step_times for rank in group)]
    if not complete:
        return {}
    group = max(complete, key=len)
    together = align_steps({rank: attempt.step_times[rank] for rank in group})
    if together is None or len(together.steps) < LEAST_STEPS:
        return {}
    columns = {STEP_TIME: _over_ranks(together, "total", median)}
    columns |= {phase: _over_ranks(together, phase, fmean) for phase in _PHASES}
    if len(group) > 1:
        shortest = together.shortest_waits()
        waits = _over_ranks(together, "wait", fmean)
        columns["exposed communication"] = list(map(float, shortest))
        columns["waiting"] = [wait - least for wait, least in zip(waits, shortest, strict=True)]
    figures = {name: measured(values) for name, values in columns.items()}
    # The same number as in the report of the run.
    step = median(median(together.columns[rank]["total"]) for rank in group)
    return {**figures, STEP_TIME: replace(figures[STEP_TIME], value=float(step))}


def _over_ranks(
    together: AlignedSteps, part: str, average: Callable[[Sequence[float]], float]
) -> list[float]:
    columns = [together.columns[rank][part] for rank in together.ranks]
    return [float(average(values)) for values in zip(*columns, strict=True)]


def measured(values: Sequence[float]) -> Measured:
    """The median of a series, and the range of the medians of its intervals."""
    ends = [len(values) * number // INTERVALS for number in range(INTERVALS + 1)]
    medians = [median(values[first:end]) for first, end in pairwise(ends) if end > first]
    return Measured(median(values), min(medians), max(medians))
