"""When each rank took its steps and how often its gradients were reduced: what samples are joined to."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from ddpcheck.analysis.module_key import ModuleKey

MOST_POINTS = 512
# Of all ranks together, more or less: with thousands of ranks each has fewer.
_POINTS_OF_ALL = 64 * MOST_POINTS
_FEWEST_POINTS = 16

Line = tuple[ModuleKey, int]  # an optimizer's steps on a module


class StepTimeline:
    """Times of the steps of one optimizer on one rank; of a long job every second, fourth, … of them."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._times = array("d")
        self._steps = array("q")
        self._stride = 1

    def add(self, step: int, time: float) -> None:
        """A step was over at this time."""
        if self._steps and (step <= self._steps[-1] or time < self._times[-1]):
            return
        # The last point is always the latest, whether or not it is one of those to keep.
        if len(self._steps) > 1 and self._steps[-1] % self._stride:
            self._steps.pop()
            self._times.pop()
        self._steps.append(step)
        self._times.append(time)
        if len(self._steps) > self._most:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        last = len(self._steps) - 1
        kept = [n for n, step in enumerate(self._steps) if step % self._stride == 0 or n in (0, last)]
        self._steps = array("q", [self._steps[n] for n in kept])
        self._times = array("d", [self._times[n] for n in kept])

    @property
    def steps(self) -> int:
        return self._steps[-1] + 1 if self._steps else 0

    @property
    def began(self) -> float:
        """The end of the first step: the next one is the first that is like all others."""
        return self._times[0]

    @property
    def ended(self) -> float:
        return self._times[-1]

    def at(self, time: float) -> float:
        """How many steps were over at a time, the one under way by its share."""
        place = bisect_right(self._times, time)
        if place == 0:
            return float(self._steps[0])
        if place == len(self._times):
            return float(self._steps[-1])
        before, after = self._times[place - 1], self._times[place]
        share = (time - before) / (after - before) if after > before else 1.0
        return self._steps[place - 1] + share * (self._steps[place] - self._steps[place - 1])

    def when(self, step: float) -> float:
        """The time at which a step was over; between two that are known, by its share."""
        place = bisect_left(self._steps, step)
        if place == 0 or place == len(self._steps):
            return self._times[min(place, len(self._times) - 1)]
        before, after = self._steps[place - 1], self._steps[place]
        share = (step - before) / (after - before)
        return self._times[place - 1] + share * (self._times[place] - self._times[place - 1])


class StepTimes:
    """Of one attempt, fed record by record."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[Line, StepTimeline]] = {}
        # Backwards that DDP reduced, by module: all ranks count the same.
        self._reductions: dict[ModuleKey, int] = {}

    def step(self, rank: int, line: Line, step: int, time: float) -> None:
        if time <= 0:
            return
        lines = self._lines.setdefault(rank, {})
        if line not in lines:
            share = _POINTS_OF_ALL // len(self._lines)
            lines[line] = StepTimeline(max(_FEWEST_POINTS, min(MOST_POINTS, share)))
        lines[line].add(step, time)

    def reduced(self, module: ModuleKey, number: int) -> None:
        self._reductions[module] = max(number, self._reductions.get(module, 0))

    def of(self, rank: int) -> StepTimeline | None:
        """The rank's steps; with several optimizers, of the one that took the most."""
        lines = self._lines.get(rank, {})
        return max(lines.values(), key=lambda line: line.steps) if lines else None

    def reductions(self, module: ModuleKey) -> int | None:
        """None where gradients were not looked at."""
        return self._reductions.get(module)

    def window(self, ranks: Iterable[int] | None = None) -> tuple[float, float] | None:
        """From when all of the ranks had taken their first step to when the first of them had taken its last."""
        lines = [line for line in map(self.of, self._lines if ranks is None else ranks) if line is not None]
        if not lines:
            return None
        began, ended = max(line.began for line in lines), min(line.ended for line in lines)
        return (began, ended) if ended > began else None
