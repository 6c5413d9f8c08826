"""From a kernel back to the processor: the step and the call that started it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from ddpcheck.traces.event_filter import Launch, Mark, Thread
from ddpcheck.traces.intervals import Cover, Interval
from ddpcheck.traces.rank_trace import StepWindow

# c10d's operation, its parameters and the backend's annotation enclose one launch; calls may nest once more.
_MOST_NESTED = 8


class StepFinder:
    """Which step a moment on the processor belongs to."""

    def __init__(self, steps: Sequence[StepWindow]) -> None:
        self._steps = sorted(steps, key=lambda step: step.start)
        self._starts = [step.start for step in self._steps]

    def at(self, moment: int) -> int | None:
        index = bisect_right(self._starts, moment) - 1
        if index < 0 or moment >= self._steps[index].end:
            return None
        return self._steps[index].number


class MarkFinder:
    """Which spans on its thread enclose a launch."""

    def __init__(self, marks: Mapping[Thread, Iterable[Mark]]) -> None:
        self._marks = {thread: sorted(each, key=lambda mark: mark.start) for thread, each in marks.items()}
        self._starts = {thread: [mark.start for mark in each] for thread, each in self._marks.items()}

    def around(self, launch: Launch) -> list[Mark]:
        """The innermost first."""
        thread, at = launch
        last = bisect_right(self._starts.get(thread, []), at)
        near = self._marks.get(thread, [])[max(0, last - _MOST_NESTED) : last]
        return [mark for mark in reversed(near) if at <= mark.end]


class SpanFinder:
    """Whether a call came from inside one of certain spans, such as those in which DDP starts its buckets."""

    def __init__(self, spans: Mapping[Thread, Iterable[Interval]]) -> None:
        self._covers = {thread: Cover(each) for thread, each in spans.items()}

    @property
    def seen(self) -> bool:
        return bool(self._covers)

    def holds(self, launch: Launch) -> bool:
        thread, at = launch
        cover = self._covers.get(thread)
        return cover is not None and cover.within(at, at + 1) > 0
