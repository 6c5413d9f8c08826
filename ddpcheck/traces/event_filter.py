"""Keeps of all events the few kinds that tell about communication, compute and steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from ddpcheck.traces.events import NO_ARGS, Args, Event, EventPrefilter, nanoseconds
from ddpcheck.traces.intervals import Interval
from ddpcheck.traces.kernels import communicates
from ddpcheck.traces.messages import Message, message_in

Thread = tuple[Any, Any]
# A kernel or a copy: start, end, and the id that leads to the call that started it. There are too many of them
# for anything heavier than a tuple.
DeviceWork = tuple[int, int, int | None]
# Where on the processor a kernel was started: the thread, and when.
Launch = tuple[Thread, int]

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
# Backends that communicate on the processor; NCCL's annotations only mark its launches.
_CPU_BACKENDS = ("gloo:", "mpi:", "ucc:")
_LAUNCH_MARKS = ("nccl:", "record_param_comms", "c10d::", "_c10d_functional::")
# DDP's reducer starts a bucket from the node that accumulates its last gradient.
_ACCUMULATION = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
# What ddpcheck did itself, in a profile that was made under it.
_OWN = "ddpcheck"
_LOOKED_AT = (*_CPU_BACKENDS, *_LAUNCH_MARKS, "ProfilerStep", _ACCUMULATION, _OWN)
# Categories, as newer and as older versions of the profiler name them.
_KERNELS = ("kernel", "Kernel")
_COPIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
_RUNTIMES = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime")
_OPERATORS = ("cpu_op", "Operator")
_ANNOTATION = "user_annotation"
# What traces are full of and nothing here depends on; by category and the beginning of the name.
_PLENTIFUL = (
    ("python_function", ""),
    ("gpu_user_annotation", ""),
    ("cuda_runtime", "cudaEvent"),
    ("cuda_runtime", "cudaStream"),
    ("cuda_runtime", "cudaDevice"),
    ("cuda_runtime", "cudaFunc"),
    ("cuda_runtime", "cudaOccupancy"),
)
_PLENTIFUL_OPERATIONS = (("cpu_op", "aten::"), ("cpu_op", "torch"))
_STARTS_DEVICE_WORK = re.compile("launch|memcpy|memset", re.IGNORECASE)


class CollectiveWork(NamedTuple):
    """A kernel of NCCL or RCCL, or a span of a backend that runs on the processor."""

    start: int
    end: int
    name: str
    lane: Any
    correlation: int | None
    message: Message


class Mark(NamedTuple):
    """A span on a thread of the processor that belongs to the launch of a collective."""

    start: int
    end: int
    name: str
    message: Message


class EventFilter:
    """Takes events one by one, in any order; times stay as written, without the trace's base time."""

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
        # Only where the processor did the computing; on a GPU's trace they would be most of the work.
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
    def thinner(self) -> EventPrefilter:
        """Leaves out the most frequent of what `take` would leave out."""
        return EventPrefilter(_PLENTIFUL if self._with_operations else [*_PLENTIFUL, *_PLENTIFUL_OPERATIONS])

    def take(self, events: Iterable[Event]) -> None:
        """Keep what matters of `events`."""
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
        if not name.startswith(_LOOKED_AT):
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
        # Operations come with those they call: all but the outermost add nothing to what is covered.
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
