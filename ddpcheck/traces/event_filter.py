"""Keeps the events that show communication, compute and steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from ddpcheck.traces.events import NO_ARGS, Args, Event, EventPrefilter, nanoseconds
from ddpcheck.traces.intervals import Interval
from ddpcheck.traces.messages import Message, communicates, message_in

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
