"""Times the phases of a step: on the host with its clock, on a device with events that are read later.

Nothing here waits for the device. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ddpcheck.device_api import DeviceApi, api_of, devices_of

# Buffers are synchronised inside a forward, a reduction is finished inside a backward.
DATA, FORWARD, BUFFERS, BACKWARD, FINISH, OPTIMIZER = range(6)
PHASES = 6
# On a device only: kernels of ddpcheck, by the phase that contains them; outside of any they count in the total alone.
OWN_FORWARD, OWN_BACKWARD, OWN_OUTSIDE = range(PHASES, PHASES + 3)
DEVICE_PHASES = PHASES + 3

# Steps whose events may be pending; if a device is further behind, the oldest are dropped.
MAX_PENDING = 64


class PhaseTimes(NamedTuple):
    """One optimizer step, in microseconds; `total` excludes the time that ddpcheck itself took."""

    step: int
    total: int
    data: int
    forward: int
    backward: int
    # Communication: the parts of forward and backward in which DDP synchronises.
    wait: int
    optimizer: int
    watching: int
    # Runnable without a CPU; -1: unknown.
    queued: int
    # Page faults of the training thread, and its system time; -1: unknown.
    faults: int = -1
    kernel: int = -1


class FinishedStep(NamedTuple):
    """What the host timer measured of one step, in nanoseconds, and the counters of the system."""

    step: int
    total: int
    spent: list[int]
    watching: int
    counters: tuple[int, int, int]

    def times(self) -> PhaseTimes:
        spent = self.spent
        queued, faults, kernel = self.counters
        return PhaseTimes(
            step=self.step,
            total=_from_nanoseconds(self.total),
            data=_from_nanoseconds(spent[DATA]),
            forward=_from_nanoseconds(max(0, spent[FORWARD] - spent[BUFFERS])),
            backward=_from_nanoseconds(max(0, spent[BACKWARD] - spent[FINISH])),
            wait=_from_nanoseconds(spent[BUFFERS] + spent[FINISH]),
            optimizer=_from_nanoseconds(spent[OPTIMIZER]),
            watching=_from_nanoseconds(self.watching),
            queued=queued,
            faults=faults,
            kernel=kernel,
        )


class HostPhaseTimer:
    """Sums the phases of a step from their begin and end times in nanoseconds."""

    def __init__(self) -> None:
        self._begun = [0] * PHASES
        self._spent = [0] * PHASES
        # Time spent on batches that no training forward has used yet.
        self._fetched = 0
        self._step_begun = 0
        self._own = 0

    def begin(self, phase: int, now: int) -> None:
        self._begun[phase] = now

    def end(self, phase: int, now: int) -> None:
        """An end without a begin, as after an exception, has no effect."""
        begun = self._begun[phase]
        if begun:
            self._begun[phase] = 0
            self._spent[phase] += now - begun

    def is_open(self, phase: int) -> bool:
        return self._begun[phase] != 0

    def batch_received(self, now: int) -> None:
        begun = self._begun[DATA]
        if begun:
            self._begun[DATA] = 0
            self._fetched += now - begun

    def loader_exhausted(self) -> None:
        """The batches that this loader yielded since the last forward were not training data."""
        self._begun[DATA] = 0
        self._fetched = 0

    def count_batches(self) -> None:
        """A training forward begins: the batches fetched before it belong to the step."""
        self._spent[DATA] += self._fetched
        self._fetched = 0

    def close(self, step: int, now: int, own: int, counters: tuple[int, int, int]) -> FinishedStep | None:
        """End a step and begin the next; None for the first, whose begin is unknown."""
        step_begun, self._step_begun = self._step_begun, now
        own_before, self._own = self._own, own
        spent, self._spent = self._spent, [0] * PHASES
        self._begun = [0] * PHASES
        if not step_begun:
            return None
        return FinishedStep(step, now - step_begun, spent, own - own_before, counters)


class DevicePhaseTimes(NamedTuple):
    """One optimizer step on the device, in microseconds."""

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
        # Of ddpcheck's own kernels in this step, known once it was read.
        self.own_ns = 0

    def ready(self) -> bool:
        """Queries the last event first: it is usually the pending one. The others may be on other streams."""
        return bool(self.ended.query()) and all(event.query() for event in self.events())

    def read(self) -> DevicePhaseTimes:
        try:
            return self._read()
        except (RuntimeError, ValueError):
            # The time between events of two devices is undefined.
            return UNKNOWN

    def _read(self) -> DevicePhaseTimes:
        spent = [0.0] * DEVICE_PHASES
        for phase, begin, end in self.spans:
            spent[phase] += begin.elapsed_time(end)
        own = spent[OWN_FORWARD] + spent[OWN_BACKWARD] + spent[OWN_OUTSIDE]
        self.own_ns = max(0, round(own * 1e6))
        return DevicePhaseTimes(
            total=_from_milliseconds(self.began.elapsed_time(self.ended) - own),
            forward=_from_milliseconds(spent[FORWARD] - spent[BUFFERS] - spent[OWN_FORWARD]),
            backward=_from_milliseconds(spent[BACKWARD] - spent[FINISH] - spent[OWN_BACKWARD]),
            wait=_from_milliseconds(spent[BUFFERS] + spent[FINISH]),
            optimizer=_from_milliseconds(spent[OPTIMIZER]),
        )

    def events(self) -> list[Any]:
        """All but the last, which is also the first of the next step."""
        return [self.began, *(event for _, begin, end in self.spans for event in (begin, end))]


class DevicePhaseTimer:
    """Records an event at each begin and end that the host timer also measures, on the device of the module.

    Begins are recorded behind the kernels that probes launch at the same hook, ends before them.
    """

    def __init__(self, make_event: Callable[[], Any], record: Callable[[Any], None]) -> None:
        self._make_event = make_event
        self._record = record
        self._free: list[Any] = []
        self._begun: list[Any] = [None] * DEVICE_PHASES
        self._spans: list[tuple[int, Any, Any]] = []
        self._step_begun: Any = None

    def begin(self, phase: int) -> None:
        self._release(self._begun[phase])
        self._begun[phase] = self._event()

    def end(self, phase: int) -> None:
        begin, self._begun[phase] = self._begun[phase], None
        if begin is not None:
            self._spans.append((phase, begin, self._event()))

    def close(self) -> PhaseEvents | None:
        step_begun, self._step_begun = self._step_begun, self._event()
        spans, self._spans = self._spans, []
        for event in self._begun:
            self._release(event)
        self._begun = [None] * DEVICE_PHASES
        if step_begun is None:
            return None
        return PhaseEvents(step_begun, self._step_begun, spans)

    def is_open(self, phase: int) -> bool:
        return self._begun[phase] is not None

    def begin_own(self) -> None:
        """Probes may launch kernels from here to `end_own`."""
        inside = {FORWARD: OWN_FORWARD, BACKWARD: OWN_BACKWARD}
        self.begin(next((own for phase, own in inside.items() if self.is_open(phase)), OWN_OUTSIDE))

    def end_own(self) -> None:
        for phase in (OWN_FORWARD, OWN_BACKWARD, OWN_OUTSIDE):
            self.end(phase)

    def recycle(self, events: PhaseEvents) -> None:
        """Events are reused, since making them is expensive."""
        self._free += events.events()

    def _release(self, event: Any) -> None:
        """For a phase that never ended: a forward without buffers, a backward that raised."""
        if event is not None:
            self._free.append(event)

    def _event(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        self._record(event)
        return event


def device_timer(tensors: list[torch.Tensor]) -> DevicePhaseTimer | None:
    """A timer for the first device of these tensors; None if they are on the CPU."""
    for device in devices_of(tensors):
        api = api_of(device)
        if api is not None:
            return DevicePhaseTimer(partial(api.event, timing=True), partial(_record, api, device))
    return None


def _record(api: DeviceApi, device: torch.device, event: Any) -> None:
    api.record(event, device)


def _from_nanoseconds(nanoseconds: int) -> int:
    return (nanoseconds + 500) // 1000


def _from_milliseconds(milliseconds: float) -> int:
    return max(0, round(milliseconds * 1000))
