"""Builds the trace of one rank from its filtered events."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpcheck.traces.event_filter import CollectiveWork, DeviceWork, EventFilter, Launch, Mark, Thread
from ddpcheck.traces.intervals import Cover, Interval
from ddpcheck.traces.messages import CollectiveKind, Message, kind_of, short_name
from ddpcheck.traces.rank_trace import Collective, RankTrace, StepWindow, Work

# c10d's operation, its parameters and the backend's annotation enclose one launch; calls may nest once more.
_MOST_NESTED = 8


class StepFinder:
    """The step that a CPU time belongs to."""

    def __init__(self, steps: Sequence[StepWindow]) -> None:
        self._steps = sorted(steps, key=lambda step: step.start)
        self._starts = [step.start for step in self._steps]

    def at(self, time: int) -> int | None:
        index = bisect_right(self._starts, time) - 1
        if index < 0 or time >= self._steps[index].end:
            return None
        return self._steps[index].number


class MarkFinder:
    """The spans on its thread that enclose a launch."""

    def __init__(self, marks: Mapping[Thread, Iterable[Mark]]) -> None:
        self._marks = {thread: sorted(each, key=lambda mark: mark.start) for thread, each in marks.items()}
        self._starts = {thread: [mark.start for mark in each] for thread, each in self._marks.items()}

    def around(self, launch: Launch) -> list[Mark]:
        """Enclosing spans, the innermost first."""
        thread, at = launch
        last = bisect_right(self._starts.get(thread, []), at)
        near = self._marks.get(thread, [])[max(0, last - _MOST_NESTED) : last]
        return [mark for mark in reversed(near) if at <= mark.end]


class SpanFinder:
    """Whether a launch lies inside given spans, such as those in which DDP starts its buckets."""

    def __init__(self, spans: Mapping[Thread, Iterable[Interval]]) -> None:
        self._covers = {thread: Cover(each) for thread, each in spans.items()}

    @property
    def has_spans(self) -> bool:
        return bool(self._covers)

    def holds(self, launch: Launch) -> bool:
        thread, at = launch
        cover = self._covers.get(thread)
        return cover is not None and cover.within(at, at + 1) > 0


@dataclass(frozen=True)
class Identity:
    """Rank, file and base time of a trace."""

    rank: int
    file: str
    world_size: int | None
    base_ns: int


def build(event_filter: EventFilter, identity: Identity) -> RankTrace:
    """Everything that `event_filter` kept, correlated, in nanoseconds since 1970."""
    builder = _Builder(event_filter, identity.base_ns)
    on_gpu = bool(event_filter.collective_kernels)
    collectives = builder.from_kernels() if on_gpu else builder.from_spans()
    in_order = sorted(collectives, key=lambda each: (each.start, each.end))
    return RankTrace(
        rank=identity.rank,
        file=identity.file,
        source="GPU kernels" if on_gpu else f"spans of {_backend(event_filter)}",
        world_size=identity.world_size,
        collectives=tuple(_numbered_buckets(in_order)),
        compute=tuple(
            builder.device_work(event_filter.kernels) if event_filter.kernels else builder.operations()
        ),
        copies=tuple(builder.device_work(event_filter.copies)),
        steps=builder.steps,
        own=tuple(builder.own_work()),
    )


def _backend(event_filter: EventFilter) -> str:
    return (
        event_filter.collective_spans[0].name.partition(":")[0]
        if event_filter.collective_spans
        else "no backend"
    )


class _Builder:
    def __init__(self, event_filter: EventFilter, base: int) -> None:
        self._events = event_filter
        self._base = base
        windows = [StepWindow(number, start, end) for start, end, number, _ in sorted(event_filter.steps)]
        self._step_finder = StepFinder(windows)
        self._marks = MarkFinder(event_filter.marks)
        self._backward = SpanFinder(event_filter.accumulations)
        self._own = SpanFinder(event_filter.own)
        self.steps = tuple(replace(step, start=step.start + base, end=step.end + base) for step in windows)

    def from_kernels(self) -> Iterator[Collective]:
        for work in self._events.collective_kernels:
            launch = self._launch(work.correlation)
            marks = self._marks.around(launch) if launch else []
            # The call is the outermost mark; without marks, the launch is used.
            call = (launch[0], marks[-1].start) if launch and marks else launch
            yield self._collective(work, call, marks)

    def from_spans(self) -> Iterator[Collective]:
        """CPU backends execute calls in order, so the n-th span of a kind is the n-th call."""
        spans = sorted(self._events.collective_spans, key=lambda work: work.start)
        calls = self._calls()
        counts = Counter(kind_of(work.name) for work in spans)
        taken: Counter[CollectiveKind] = Counter()
        for work in spans:
            kind = kind_of(work.name)
            of_kind = calls.get(kind, [])
            call, mark = None, []
            if len(of_kind) == counts[kind]:
                call, mark = of_kind[taken[kind]][0], [of_kind[taken[kind]][1]]
            taken[kind] += 1
            yield self._collective(work, call, mark)

    def _calls(self) -> dict[CollectiveKind, list[tuple[Launch, Mark]]]:
        calls: dict[CollectiveKind, list[tuple[Launch, Mark]]] = {}
        for thread, marks in self._events.marks.items():
            for mark in marks:
                if mark.name.startswith("c10d::"):
                    calls.setdefault(kind_of(mark.name), []).append(((thread, mark.start), mark))
        return {kind: sorted(each, key=lambda call: call[1].start) for kind, each in calls.items()}

    def _collective(self, work: CollectiveWork, call: Launch | None, marks: Sequence[Mark]) -> Collective:
        message = work.message
        for mark in marks:
            message = message.filled_from(mark.message)
        return Collective(
            start=work.start + self._base,
            # A span that was running when the recording ended may have a negative duration.
            end=max(work.start, work.end) + self._base,
            kind=_kind(work, message, marks),
            name=short_name(work.name),
            lane=str(work.lane),
            message=message,
            ready=call[1] + self._base if call else None,
            step=self._step(call, work.start),
            # Numbered later, when all collectives of the step are known.
            bucket=0 if self._may_be_bucket(call) else None,
        )

    def _may_be_bucket(self, call: Launch | None) -> bool:
        return call is None or not self._backward.has_spans or self._backward.holds(call)

    def _launch(self, correlation: int | None) -> Launch | None:
        return None if correlation is None else self._events.launches.get(correlation)

    def _step(self, launch: Launch | None, start: int) -> int | None:
        if launch is not None:
            return self._step_finder.at(launch[1])
        # A kernel runs long after its launch; its own time is used only if there are no launches.
        return None if self._events.launches else self._step_finder.at(start)

    def device_work(self, pieces: Iterable[DeviceWork]) -> Iterator[Work]:
        base, with_own = self._base, self._own.has_spans
        for start, end, correlation in pieces:
            launch = self._launch(correlation)
            if with_own and launch is not None and self._own.holds(launch):
                continue
            yield start + base, end + base, self._step(launch, start)

    def own_work(self) -> Iterator[Interval]:
        """CPU time of ddpcheck itself, on any thread."""
        for start, end in Cover(span for spans in self._events.own.values() for span in spans):
            yield start + self._base, end + self._base

    def operations(self) -> Iterator[Work]:
        """CPU compute, without collectives and ddpcheck's own work."""
        spans: list[Interval] = []
        for thread, operations in self._events.operations.items():
            excluded = [(mark.start, mark.end) for mark in self._events.marks.get(thread, [])]
            excluded += [
                (work.start, work.end) for work in self._events.collective_spans if work.lane == thread[1]
            ]
            excluded += self._events.own.get(thread, [])
            spans += Cover(operations).without(Cover(excluded))
        for start, end in Cover(spans):
            yield start + self._base, end + self._base, self._step_finder.at(start)


def _kind(work: CollectiveWork, message: Message, marks: Sequence[Mark]) -> CollectiveKind:
    """From the arguments, else the call, else the kernel: NCCL runs an all_to_all as sends and receives."""
    kinds: list[CollectiveKind] = [message.kind, *(kind_of(mark.name) for mark in marks), kind_of(work.name)]
    return next((kind for kind in kinds if kind is not CollectiveKind.UNKNOWN), CollectiveKind.UNKNOWN)


def _numbered_buckets(collectives: Sequence[Collective]) -> Iterator[Collective]:
    """Number DDP's buckets: the all_reduces of the backward, in order within a step."""
    counts: dict[Any, int] = {}
    for each in collectives:
        if each.bucket is None or each.kind is not CollectiveKind.ALL_REDUCE:
            yield replace(each, bucket=None)
            continue
        number = counts.get(each.step, 0)
        counts[each.step] = number + 1
        yield replace(each, bucket=number)
