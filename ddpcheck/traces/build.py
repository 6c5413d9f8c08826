"""Builds the trace of one rank from the events that show communication, compute and steps."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ddpcheck.traces.events import NO_ARGS, Args, Event, EventPrefilter, nanoseconds
from ddpcheck.traces.messages import CollectiveKind, Message, communicates, kind_of, message_in, short_name
from ddpcheck.traces.rank_trace import Collective, Cover, Interval, RankTrace, StepWindow, Work

Thread = tuple[Any, Any]
# A kernel or a copy: start, end, and the correlation id of its launch. A tuple, because there are millions.
DeviceWork = tuple[int, int, int | None]
# The CPU thread that launched a kernel, and the time.
Launch = tuple[Thread, int]

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
# Backends that communicate on the CPU; NCCL's annotations only mark its launches.
_CPU_BACKENDS = ("gloo:", "mpi:", "ucc:")
_LAUNCH_MARKS = ("nccl:", "record_param_comms", "c10d::", "_c10d_functional::")
# DDP's reducer starts a bucket from the node that accumulates its last gradient.
_ACCUMULATION = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
# Spans of ddpcheck itself.
_OWN = "ddpcheck"
_RELEVANT = (*_CPU_BACKENDS, *_LAUNCH_MARKS, "ProfilerStep", _ACCUMULATION, _OWN)
# Categories of newer and older versions of the profiler.
_KERNELS = ("kernel", "Kernel")
_COPIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
_RUNTIMES = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime")
_OPERATORS = ("cpu_op", "Operator")
_ANNOTATION = "user_annotation"
# Frequent events that are not used, by category and prefix of the name.
_FREQUENT = (
    ("python_function", ""),
    ("gpu_user_annotation", ""),
    ("cuda_runtime", "cudaEvent"),
    ("cuda_runtime", "cudaStream"),
    ("cuda_runtime", "cudaDevice"),
    ("cuda_runtime", "cudaFunc"),
    ("cuda_runtime", "cudaOccupancy"),
)
_FREQUENT_OPERATIONS = (("cpu_op", "aten::"), ("cpu_op", "torch"))
_STARTS_DEVICE_WORK = re.compile("launch|memcpy|memset", re.IGNORECASE)


class CollectiveWork(NamedTuple):
    """A kernel of NCCL or RCCL, or a span of a backend that runs on the CPU."""

    start: int
    end: int
    name: str
    lane: Any
    correlation: int | None
    message: Message


class Mark(NamedTuple):
    """A span on a CPU thread that belongs to the launch of a collective."""

    start: int
    end: int
    name: str
    message: Message


class EventFilter:
    """Collects relevant events in any order; times do not include the trace's base time."""

    def __init__(self, with_operations: bool = False) -> None:
        self.kernels: list[DeviceWork] = []
        self.copies: list[DeviceWork] = []
        self.collective_kernels: list[CollectiveWork] = []
        self.collective_spans: list[CollectiveWork] = []
        self.launches: dict[int, Launch] = {}
        self.marks: dict[Thread, list[Mark]] = {}
        self.steps: list[tuple[int, int, int, Thread]] = []
        self.accumulations: dict[Thread, list[Interval]] = {}
        self.own: dict[Thread, list[Interval]] = {}
        # Only for CPU jobs; in the trace of a GPU job they would be most of the work.
        self.operations: dict[Thread, list[Interval]] = {}
        self.rank_in_args: int | None = None
        self._with_operations = with_operations
        self._by_category = {
            **dict.fromkeys(_KERNELS, self._kernel),
            **dict.fromkeys(_COPIES, self._copy),
            **dict.fromkeys(_RUNTIMES, self._runtime),
            **dict.fromkeys((*_OPERATORS, _ANNOTATION), self._host_span),
        }

    @property
    def prefilter(self) -> EventPrefilter:
        """Drops the most frequent events that `add` ignores."""
        return EventPrefilter(_FREQUENT if self._with_operations else [*_FREQUENT, *_FREQUENT_OPERATIONS])

    def add(self, events: Iterable[Event]) -> None:
        """Keep the relevant ones of `events`."""
        by_category = self._by_category
        for event in events:
            if event.ph == "X" and (keep := by_category.get(event.cat)) and type(event.name) is str:
                keep(event)

    def _kernel(self, event: Event) -> None:
        start, end = _times(event)
        if not communicates(event.name):
            self.kernels.append((start, end, _correlation(event)))
            return
        args = _args(event)
        lane = event.tid if args.stream is None else args.stream
        self.collective_kernels.append(
            CollectiveWork(start, end, event.name, lane, _correlation(event), message_in(args))
        )

    def _copy(self, event: Event) -> None:
        self.copies.append((*_times(event), _correlation(event)))

    def _runtime(self, event: Event) -> None:
        if not _starts_device_work(event.name):
            return
        correlation = _correlation(event)
        if correlation is not None:
            self.launches[correlation] = (event.pid, event.tid), nanoseconds(bytes(event.ts))

    def _host_span(self, event: Event) -> None:
        name = event.name
        if self._with_operations and event.cat != _ANNOTATION and not name.startswith(_LAUNCH_MARKS):
            self._operation(event)
        if not name.startswith(_RELEVANT):
            return
        thread = event.pid, event.tid
        start, end = _times(event)
        if name.startswith(_CPU_BACKENDS):
            work = CollectiveWork(start, end, name, event.tid, None, message_in(_args(event)))
            self.collective_spans.append(work)
        elif name.startswith(_LAUNCH_MARKS):
            args = _args(event)
            self.marks.setdefault(thread, []).append(Mark(start, end, name, message_in(args)))
            if isinstance(args.rank, int):
                self.rank_in_args = args.rank
        elif name.startswith(_ACCUMULATION):
            self.accumulations.setdefault(thread, []).append((start, end))
        elif name == _OWN:
            self.own.setdefault(thread, []).append((start, max(start, end)))
        elif numbered := _STEP.match(name):
            self.steps.append((start, end, int(numbered[1]), thread))

    def _operation(self, event: Event) -> None:
        start, end = _times(event)
        kept = self.operations.setdefault((event.pid, event.tid), [])
        # Nested operations add nothing to the time covered by the outermost one.
        if kept and kept[-1][0] <= start and end <= kept[-1][1]:
            return
        kept.append((start, end))


@lru_cache(maxsize=1024)
def _starts_device_work(call: str) -> bool:
    return _STARTS_DEVICE_WORK.search(call) is not None


def _times(event: Event) -> Interval:
    start = nanoseconds(bytes(event.ts))
    return start, start + nanoseconds(bytes(event.dur) or b"0")


def _correlation(event: Event) -> int | None:
    correlation = getattr(event.args, "correlation", None)
    return correlation if type(correlation) is int else None


def _args(event: Event) -> Args:
    return event.args if isinstance(event.args, Args) else NO_ARGS


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
    """Whether a launch is inside given spans, such as those in which DDP starts its buckets."""

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
