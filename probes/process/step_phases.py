"""The parts of a step as a device went through them: events that are recorded now and read late.

Nothing here waits for the device. Not run on a GPU so far: tests put other events in the place of CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# What begins and ends. Buffers are synchronised inside a forward, a reduction is finished inside a backward.
DATA, FORWARD, BUFFERS, BACKWARD, FINISH, OPTIMIZER = range(6)
PARTS = 6


class PhaseTimes(NamedTuple):
    """One optimizer step, in microseconds; `total` is without the time that ddpcheck itself took."""

    step: int
    total: int
    data: int
    forward: int
    backward: int
    # For communication: the parts of forward and backward in which DDP synchronises.
    wait: int
    optimizer: int
    watching: int
    # In line for a processor; -1: not known.
    queued: int
    # Page faults of the training thread, and the kernel's time; -1: not known.
    faults: int = -1
    kernel: int = -1


class HostPhaseTimer:
    """Told of the begin and end of parts in nanoseconds; several of one part in a step are added up."""

    def __init__(self) -> None:
        self._since = [0] * PARTS
        self._spent = [0] * PARTS
        # Batches that were fetched and not yet trained on.
        self._fetched = 0
        self._began = 0
        self._watched = 0

    def begin(self, part: int, now: int) -> None:
        self._since[part] = now

    def end(self, part: int, now: int) -> None:
        """An end without a begin, as after an exception, says nothing."""
        since = self._since[part]
        if since:
            self._since[part] = 0
            self._spent[part] += now - since

    def under_way(self, part: int) -> bool:
        return self._since[part] != 0

    def got_batch(self, now: int) -> None:
        since = self._since[DATA]
        if since:
            self._since[DATA] = 0
            self._fetched += now - since

    def ran_out(self) -> None:
        """A loader came to its end: what was fetched since the last forward was no training data."""
        self._since[DATA] = 0
        self._fetched = 0

    def feed(self) -> None:
        """A training forward: what was fetched before it counts."""
        self._spent[DATA] += self._fetched
        self._fetched = 0

    def close(
        self, step: int, now: int, tracked: int, queued: int, faults: int = -1, kernel: int = -1
    ) -> PhaseTimes | None:
        """A step is done and the next begins; None for the first, whose begin nobody saw."""
        began, self._began = self._began, now
        before, self._watched = self._watched, tracked
        spent, self._spent = self._spent, [0] * PARTS
        self._since = [0] * PARTS
        if not began:
            return None
        forward = max(0, spent[FORWARD] - spent[BUFFERS])
        backward = max(0, spent[BACKWARD] - spent[FINISH])
        return PhaseTimes(
            step=step,
            total=_step_clock_micro(now - began),
            data=_step_clock_micro(spent[DATA]),
            forward=_step_clock_micro(forward),
            backward=_step_clock_micro(backward),
            wait=_step_clock_micro(spent[BUFFERS] + spent[FINISH]),
            optimizer=_step_clock_micro(spent[OPTIMIZER]),
            watching=_step_clock_micro(tracked - before),
            queued=queued,
            faults=faults,
            kernel=kernel,
        )


def _step_clock_micro(nanoseconds: int) -> int:
    return (nanoseconds + 500) // 1000


# Steps whose events may be on their way; of a device that is further behind the oldest are given up.
MOST_PENDING = 64


class DevicePhaseTimes(NamedTuple):
    """One optimizer step, in microseconds."""

    total: int
    forward: int
    backward: int
    wait: int
    optimizer: int


UNKNOWN = DevicePhaseTimes(-1, -1, -1, -1, -1)


class PhaseEvents:
    """The events of one step."""

    def __init__(self, began: Any, ended: Any, spans: list[tuple[int, Any, Any]]) -> None:
        self.began = began
        self.ended = ended
        self.spans = spans

    def ready(self) -> bool:
        """The last event first: most often it is the one that is missing. The others may lie on other streams."""
        return bool(self.ended.query()) and all(event.query() for event in self.events())

    def read(self) -> DevicePhaseTimes:
        try:
            return self._read()
        except (RuntimeError, ValueError):
            # Between events of two devices there is no time to be had.
            return UNKNOWN

    def _read(self) -> DevicePhaseTimes:
        spent = [0.0] * PARTS
        for part, begin, end in self.spans:
            spent[part] += begin.elapsed_time(end)
        return DevicePhaseTimes(
            total=_micro(self.began.elapsed_time(self.ended)),
            forward=_micro(spent[FORWARD] - spent[BUFFERS]),
            backward=_micro(spent[BACKWARD] - spent[FINISH]),
            wait=_micro(spent[BUFFERS] + spent[FINISH]),
            optimizer=_micro(spent[OPTIMIZER]),
        )

    def events(self) -> list[Any]:
        """All but the last, which is also the first of the next step."""
        return [self.began, *(event for _, begin, end in self.spans for event in (begin, end))]


class DevicePhaseTimer:
    """Told of the same begins and ends as the host's clock."""

    def __init__(self, make_event: Callable[[], Any], capturing: Callable[[], bool]) -> None:
        self._make_event = make_event
        self._capturing = capturing
        self._free: list[Any] = []
        self._since: list[Any] = [None] * PARTS
        self._spans: list[tuple[int, Any, Any]] = []
        self._began: Any = None

    def begin(self, part: int) -> None:
        self._let_go(self._since[part])
        self._since[part] = self._event()

    def end(self, part: int) -> None:
        begin, self._since[part] = self._since[part], None
        end = self._event() if begin is not None else None
        if end is not None:
            self._spans.append((part, begin, end))

    def close(self) -> PhaseEvents | None:
        began, self._began = self._began, self._event()
        spans, self._spans = self._spans, []
        for event in self._since:
            self._let_go(event)
        self._since = [None] * PARTS
        if began is None or self._began is None:
            return None
        return PhaseEvents(began, self._began, spans)

    def done_with(self, marks: PhaseEvents) -> None:
        """Events are used again: making them is what costs."""
        self._free += marks.events()

    def _let_go(self, event: Any) -> None:
        """Of a part that never ended: a forward without buffers, a backward that raised."""
        if event is not None:
            self._free.append(event)

    def _event(self) -> Any:
        # An event recorded while a graph is being captured would become a part of it.
        if self._capturing():
            return None
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event


def clock_for(tensors: list[torch.Tensor]) -> DevicePhaseTimer | None:
    """A clock for the device that these tensors live on; None where the host's own is all there is."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    cuda: Any = torch.cuda
    return DevicePhaseTimer(lambda: cuda.Event(enable_timing=True), cuda.is_current_stream_capturing)


def _micro(milliseconds: float) -> int:
    return max(0, round(milliseconds * 1000))
