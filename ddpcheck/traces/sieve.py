"""Keeps of all events the few kinds that tell about communication, compute and steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from ddpcheck.traces.events import Event
from ddpcheck.traces.intervals import Interval
from ddpcheck.traces.kernels import communicates
from ddpcheck.traces.nanoseconds import nanoseconds

Thread = tuple[Any, Any]

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
# Backends that communicate on the processor; NCCL's annotations only mark its launches.
_CPU_BACKENDS = ("gloo:", "mpi:", "ucc:")
_LAUNCH_MARKS = ("nccl:", "record_param_comms", "c10d::", "_c10d_functional::")
# DDP's reducer starts a bucket from the node that accumulates its last gradient.
_ACCUMULATION = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_LOOKED_AT = (*_CPU_BACKENDS, *_LAUNCH_MARKS, "ProfilerStep", _ACCUMULATION)
_STARTS_DEVICE_WORK = re.compile("launch|memcpy|memset", re.IGNORECASE)


class DeviceWork(NamedTuple):
    """A kernel or a copy, and the id that leads to the call that started it."""

    start: int
    end: int
    correlation: int | None


class CollectiveWork(NamedTuple):
    """A kernel of NCCL or RCCL, or a span of a backend that runs on the processor."""

    start: int
    end: int
    name: str
    lane: Any
    correlation: int | None
    args: dict[str, Any]


class Mark(NamedTuple):
    """A span on a thread of the processor that belongs to the launch of a collective."""

    start: int
    end: int
    name: str
    args: dict[str, Any]


class Launch(NamedTuple):
    """Where on the processor a kernel was started."""

    thread: Thread
    at: int


class _KernelArgs(msgspec.Struct, gc=False):
    correlation: int | None = None


_kernel_args = msgspec.json.Decoder(_KernelArgs)


class Sieve:
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
        # Only where the processor did the computing; on a GPU's trace they would be most of the work.
        self.operations: dict[Thread, list[Interval]] = {}
        self.rank_in_args: int | None = None
        self._with_operations = with_operations
        device, host = self._device_work, self._host_span
        self._by_category = {
            "kernel": self._kernel,
            "Kernel": self._kernel,
            "gpu_memcpy": device,
            "gpu_memset": device,
            "Memcpy": device,
            "Memset": device,
            "cuda_runtime": self._runtime,
            "cuda_driver": self._runtime,
            "hip_runtime": self._runtime,
            "hip_driver": self._runtime,
            "Runtime": self._runtime,
            "cpu_op": host,
            "Operator": host,
            "user_annotation": host,
        }

    def take(self, events: Iterable[Event]) -> None:
        """Keep what matters of `events`."""
        by_category = self._by_category
        for event in events:
            if event.ph == "X" and (keep := by_category.get(event.cat)):
                keep(event)

    def _kernel(self, event: Event) -> None:
        start, end = _times(event)
        if communicates(str(event.name)):
            args = _all_args(event)
            self.collective_kernels.append(
                CollectiveWork(
                    start, end, str(event.name), args.get("stream", event.tid), _correlation(event), args
                )
            )
        else:
            self.kernels.append(DeviceWork(start, end, _correlation(event)))

    def _device_work(self, event: Event) -> None:
        self.copies.append(DeviceWork(*_times(event), _correlation(event)))

    def _runtime(self, event: Event) -> None:
        if not _STARTS_DEVICE_WORK.search(event.name):
            return
        correlation = _correlation(event)
        if correlation is not None:
            self.launches[correlation] = Launch((event.pid, event.tid), nanoseconds(bytes(event.ts)))

    def _host_span(self, event: Event) -> None:
        name = event.name
        if not name.startswith(_LOOKED_AT):
            if self._with_operations and event.cat != "user_annotation":
                self._operation(event)
            return
        thread = event.pid, event.tid
        start, end = _times(event)
        if name.startswith(_CPU_BACKENDS):
            work = CollectiveWork(start, end, name, event.tid, None, _all_args(event))
            self.collective_spans.append(work)
        elif name.startswith(_LAUNCH_MARKS):
            self.marks.setdefault(thread, []).append(Mark(start, end, name, self._noted(_all_args(event))))
        elif name.startswith(_ACCUMULATION):
            self.accumulations.setdefault(thread, []).append((start, end))
            if self._with_operations:
                self._operation(event)
        elif numbered := _STEP.match(name):
            self.steps.append((start, end, int(numbered[1]), thread))

    def _noted(self, args: dict[str, Any]) -> dict[str, Any]:
        if isinstance(rank := args.get("Rank"), int):
            self.rank_in_args = rank
        return args

    def _operation(self, event: Event) -> None:
        start, end = _times(event)
        kept = self.operations.setdefault((event.pid, event.tid), [])
        # Operations come with those they call: all but the outermost add nothing to what is covered.
        if kept and kept[-1][0] <= start and end <= kept[-1][1]:
            return
        kept.append((start, end))


def _times(event: Event) -> Interval:
    start = nanoseconds(bytes(event.ts))
    duration = nanoseconds(bytes(event.dur)) if event.dur else 0
    return start, start + duration


def _correlation(event: Event) -> int | None:
    try:
        return _kernel_args.decode(event.args).correlation
    except msgspec.DecodeError:
        return None


def _all_args(event: Event) -> dict[str, Any]:
    try:
        args = msgspec.json.decode(event.args)
    except msgspec.DecodeError:
        return {}
    return args if isinstance(args, dict) else {}
