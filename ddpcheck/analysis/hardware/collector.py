"""Collects the step end times of each rank and the number of reductions, to which hardware samples are joined."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.analysis.timeseries.series import BoundedSeries
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import BackwardRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.step_window import Window

MOST_POINTS = 512
# Approximate total over all ranks.
_POINTS_OF_ALL = 64 * MOST_POINTS
_FEWEST_POINTS = 16

Line = tuple[ModuleKey, int]  # module and optimizer


class StepTimeline:
    """End times of the steps of one optimizer on one rank, downsampled."""

    def __init__(self, limit: int = MOST_POINTS) -> None:
        self._series = BoundedSeries(limit, {"time": "d"}, keep_ends=True)

    @property
    def _steps(self) -> array[int]:
        return self._series.steps

    @property
    def _times(self) -> array[float]:
        times: array[float] = self._series.columns["time"]
        return times

    def add(self, step: int, time: float) -> None:
        """A step ended at this time. Times that go back are ignored."""
        if not self._times or time >= self._times[-1]:
            self._series.add_row(step, {"time": time})

    @property
    def every(self) -> int:
        """Of this many steps, one is kept."""
        return self._series.every

    @property
    def steps(self) -> int:
        return self._steps[-1] + 1 if self._steps else 0

    @property
    def began(self) -> float:
        """The end of the first step, which usually takes longer than the others."""
        return self._times[0]

    @property
    def ended(self) -> float:
        return self._times[-1]

    def at(self, time: float) -> float:
        """The step at a time, with the fraction of the current step."""
        index = bisect_right(self._times, time)
        if index == 0:
            return float(self._steps[0])
        if index == len(self._times):
            return float(self._steps[-1])
        before, after = self._times[index - 1], self._times[index]
        fraction = (time - before) / (after - before) if after > before else 1.0
        return self._steps[index - 1] + fraction * (self._steps[index] - self._steps[index - 1])

    def when(self, step: float) -> float:
        """The end time of a step, interpolated between known steps."""
        index = bisect_left(self._steps, step)
        if index == 0 or index == len(self._steps):
            return self._times[min(index, len(self._times) - 1)]
        before, after = self._steps[index - 1], self._steps[index]
        fraction = (step - before) / (after - before)
        return self._times[index - 1] + fraction * (self._times[index] - self._times[index - 1])


class StepTimes:
    """Timelines of one attempt, added record by record."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[Line, StepTimeline]] = {}
        # Reduced backwards by module; equal on all ranks.
        self._reductions: dict[ModuleKey, int] = {}

    def step(self, rank: int, line: Line, step: int, time: float) -> None:
        if time <= 0:
            return
        lines = self._lines.setdefault(rank, {})
        if line not in lines:
            share = _POINTS_OF_ALL // len(self._lines)
            lines[line] = StepTimeline(max(_FEWEST_POINTS, min(MOST_POINTS, share)))
        lines[line].add(step, time)

    def add_steps(self, rank: int, line: Line, steps: Sequence[int], times: Sequence[float]) -> None:
        """Consecutive steps: `step` for each of them that the timeline may keep."""
        known = self._lines.get(rank, {}).get(line)
        every = 1 if known is None else known.every
        before = -1
        for index, step in enumerate(steps):
            if step // every != before or index == len(steps) - 1:
                self.step(rank, line, step, times[index])
            before = step // every

    def reduced(self, module: ModuleKey, number: int) -> None:
        self._reductions[module] = max(number, self._reductions.get(module, 0))

    def of(self, rank: int) -> StepTimeline | None:
        """The rank's timeline; with several optimizers, that of the one with the most steps."""
        lines = self._lines.get(rank, {})
        return max(lines.values(), key=lambda line: line.steps) if lines else None

    def reductions(self, module: ModuleKey) -> int | None:
        """None if gradients were not recorded."""
        return self._reductions.get(module)

    def window(self, ranks: Iterable[int] | None = None) -> tuple[float, float] | None:
        """From the end of the first step on all ranks to the end of the last step on any rank."""
        lines = [line for line in map(self.of, self._lines if ranks is None else ranks) if line is not None]
        if not lines:
            return None
        began, ended = max(line.began for line in lines), min(line.ended for line in lines)
        return (began, ended) if ended > began else None


_PARAMS = Stage.PARAMS.value


class StepTimelineCollector(Collector):
    """Times of steps, and the number of reduced backwards."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.step_times = StepTimes()

    def add_window(self, window: Window) -> None:
        for stream in window.of(DigestRecord):
            if stream.constants["stage"] != _PARAMS:
                continue
            optimizer = stream.constants["optimizer"]
            line = (stream.module, -1 if optimizer is None else optimizer)
            steps = stream.steps.tolist()
            for rank, times in zip(stream.ranks, stream.floats("time").tolist(), strict=True):
                self.step_times.add_steps(rank.number, line, steps, times)
        for stream in window.of(BackwardRecord):
            self.step_times.reduced(stream.module, int(stream.integers("number").max()))

    @collects_per_module(DigestRecord)
    def add_digest(self, rank: RankData, module: ModuleKey, record: DigestRecord) -> None:
        if record.stage == _PARAMS:
            optimizer = -1 if record.optimizer is None else record.optimizer
            self.step_times.step(rank.number, (module, optimizer), record.step, record.time)

    @collects_per_module(BackwardRecord)
    def add_backward(self, rank: RankData, module: ModuleKey, record: BackwardRecord) -> None:
        self.step_times.reduced(module, record.number)
