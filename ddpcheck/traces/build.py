"""From the events of one file to one rank's trace."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpcheck.traces.event_filter import CollectiveWork, DeviceWork, EventFilter, Launch, Mark, Thread
from ddpcheck.traces.intervals import Cover, Interval
from ddpcheck.traces.kernels import CollectiveKind, kind_of, short_name
from ddpcheck.traces.messages import Message
from ddpcheck.traces.rank_trace import Collective, RankTrace, StepWindow, Work

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


@dataclass(frozen=True)
class Identity:
    """Whose trace it is."""

    rank: int
    file: str
    world_size: int | None
    base_ns: int


def build(sieve: EventFilter, identity: Identity) -> RankTrace:
    """Everything that `sieve` kept, put in relation, in nanoseconds since 1970."""
    builder = _Builder(sieve, identity.base_ns)
    on_gpu = bool(sieve.collective_kernels)
    collectives = builder.from_kernels() if on_gpu else builder.from_spans()
    in_order = sorted(collectives, key=lambda each: (each.start, each.end))
    return RankTrace(
        rank=identity.rank,
        file=identity.file,
        source="GPU kernels" if on_gpu else f"spans of {_backend(sieve)}",
        world_size=identity.world_size,
        collectives=tuple(_numbered_buckets(in_order)),
        compute=tuple(builder.device_work(sieve.kernels) if sieve.kernels else builder.operations()),
        copies=tuple(builder.device_work(sieve.copies)),
        steps=builder.steps,
        own=tuple(builder.own_work()),
    )


def _backend(sieve: EventFilter) -> str:
    return sieve.collective_spans[0].name.partition(":")[0] if sieve.collective_spans else "no backend"


class _Builder:
    def __init__(self, sieve: EventFilter, base: int) -> None:
        self._sieve = sieve
        self._base = base
        windows = [StepWindow(number, start, end) for start, end, number, _ in sorted(sieve.steps)]
        self._step_finder = StepFinder(windows)
        self._marks = MarkFinder(sieve.marks)
        self._backward = SpanFinder(sieve.accumulations)
        self._own = SpanFinder(sieve.own)
        self.steps = tuple(replace(step, start=step.start + base, end=step.end + base) for step in windows)

    def from_kernels(self) -> Iterator[Collective]:
        for work in self._sieve.collective_kernels:
            launch = self._launch(work.correlation)
            marks = self._marks.around(launch) if launch else []
            # The call itself is the outermost mark; where none shows, the moment of the launch has to do.
            called = (launch[0], marks[-1].start) if launch and marks else launch
            yield self._collective(work, called, marks)

    def from_spans(self) -> Iterator[Collective]:
        """Backends on the processor take calls in order, so the n-th span of a kind is its n-th call."""
        spans = sorted(self._sieve.collective_spans, key=lambda work: work.start)
        calls = self._calls()
        counts = Counter(kind_of(work.name) for work in spans)
        taken: Counter[CollectiveKind] = Counter()
        for work in spans:
            kind = kind_of(work.name)
            of_kind = calls.get(kind, [])
            called, mark = None, []
            if len(of_kind) == counts[kind]:
                called, mark = of_kind[taken[kind]][0], [of_kind[taken[kind]][1]]
            taken[kind] += 1
            yield self._collective(work, called, mark)

    def _calls(self) -> dict[CollectiveKind, list[tuple[Launch, Mark]]]:
        calls: dict[CollectiveKind, list[tuple[Launch, Mark]]] = {}
        for thread, marks in self._sieve.marks.items():
            for mark in marks:
                if mark.name.startswith("c10d::"):
                    calls.setdefault(kind_of(mark.name), []).append(((thread, mark.start), mark))
        return {kind: sorted(each, key=lambda call: call[1].start) for kind, each in calls.items()}

    def _collective(self, work: CollectiveWork, called: Launch | None, marks: Sequence[Mark]) -> Collective:
        message = work.message
        for mark in marks:
            message = message.filled_from(mark.message)
        return Collective(
            start=work.start + self._base,
            # A span that was still running when the recording ended may have any duration, even a negative one.
            end=max(work.start, work.end) + self._base,
            kind=_kind(work, message, marks),
            name=short_name(work.name),
            lane=str(work.lane),
            message=message,
            ready=called[1] + self._base if called else None,
            step=self._step(called, work.start),
            # Told for certain later, once all of a step are known and in order.
            bucket=0 if self._may_be_bucket(called) else None,
        )

    def _may_be_bucket(self, called: Launch | None) -> bool:
        return called is None or not self._backward.seen or self._backward.holds(called)

    def _launch(self, correlation: int | None) -> Launch | None:
        return None if correlation is None else self._sieve.launches.get(correlation)

    def _step(self, launch: Launch | None, start: int) -> int | None:
        if launch is not None:
            return self._step_finder.at(launch[1])
        # A kernel runs long after its launch; its own time says something only where nothing was launched.
        return None if self._sieve.launches else self._step_finder.at(start)

    def device_work(self, pieces: Iterable[DeviceWork]) -> Iterator[Work]:
        base, with_own = self._base, self._own.seen
        for start, end, correlation in pieces:
            launch = self._launch(correlation)
            if with_own and launch is not None and self._own.holds(launch):
                continue
            yield start + base, end + base, self._step(launch, start)

    def own_work(self) -> Iterator[Interval]:
        """What ddpcheck did on the processor, on whatever thread."""
        for start, end in Cover(span for spans in self._sieve.own.values() for span in spans):
            yield start + self._base, end + self._base

    def operations(self) -> Iterator[Work]:
        """What the processor computed: not inside a call of a collective, and not for ddpcheck."""
        spans: list[Interval] = []
        for thread, operations in self._sieve.operations.items():
            besides = [(mark.start, mark.end) for mark in self._sieve.marks.get(thread, [])]
            besides += [
                (work.start, work.end) for work in self._sieve.collective_spans if work.lane == thread[1]
            ]
            besides += self._sieve.own.get(thread, [])
            spans += Cover(operations).without(Cover(besides))
        for start, end in Cover(spans):
            yield start + self._base, end + self._base, self._step_finder.at(start)


def _kind(work: CollectiveWork, message: Message, marks: Sequence[Mark]) -> CollectiveKind:
    """Arguments know best, then the call, then the kernel: NCCL runs an all_to_all as sends and receives."""
    told: list[CollectiveKind] = [message.kind, *(kind_of(mark.name) for mark in marks), kind_of(work.name)]
    return next((kind for kind in told if kind is not CollectiveKind.UNKNOWN), CollectiveKind.UNKNOWN)


def _numbered_buckets(collectives: Sequence[Collective]) -> Iterator[Collective]:
    """DDP's buckets are the all_reduces of the backward, in their order within a step."""
    counts: dict[Any, int] = {}
    for each in collectives:
        if each.bucket is None or each.kind is not CollectiveKind.ALL_REDUCE:
            yield replace(each, bucket=None)
            continue
        number = counts.get(each.step, 0)
        counts[each.step] = number + 1
        yield replace(each, bucket=number)
