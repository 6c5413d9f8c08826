"""Times every step: data, forward, backward, waiting for communication, optimizer, and the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

from ddpcheck import torch_compat
from ddpcheck.probes.probe import Phase, Probe, ProbeContext
from ddpcheck.probes.process.os_counters import StepCounters
from ddpcheck.probes.process.step_phases import (
    BACKWARD,
    BUFFERS,
    DATA,
    FINISH,
    FORWARD,
    MAX_PENDING,
    OPTIMIZER,
    UNKNOWN,
    DevicePhaseTimer,
    DevicePhaseTimes,
    FinishedStep,
    HostPhaseTimer,
    PhaseEvents,
    device_timer,
)
from ddpcheck.records.kinds.timing import ClockRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# One record for this many steps, and at least this often: a rank that is killed loses no more.
STEPS_PER_RECORD = 16
NS_PER_RECORD = 1_000_000_000
# An optimizer that has stepped this often since the main optimizer replaces it as the main one.
REPLACES_MAIN = 2
# DDP's own averages over the iterations that it samples, in nanoseconds.
DDP_AVERAGES = {
    "forward": "avg_forward_compute_time",
    "backward": "avg_backward_compute_time",
    "communication": "avg_backward_comm_time",
    "overlap": "avg_backward_compute_comm_overlap_time",
}


class StepTimingProbe(Probe):
    """Measures the phases of each step; the time that probes spend is subtracted."""

    name = "clocks"
    phase = Phase.CLOCK
    # Begins are recorded on the device behind the kernels of other probes, and those are measured to be subtracted.
    after_others: ClassVar[Mapping[str, str]] = {
        "forward_inputs": "forward_begins",
        "buffers_synced": "own_ends",
        "backward_called": "backward_begins",
        "backward_begun": "own_ends",
        "gradients_ready": "own_ends",
        "gradients_computed": "finish_begins",
        "gradients_reduced": "own_ends",
        "before_step": "optimizer_begins",
        "after_step": "own_ends",
    }
    # On a device only.
    on_demand: ClassVar[frozenset[str]] = frozenset({"backward_begun", "gradients_ready"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._host = HostPhaseTimer()
        self._device: DevicePhaseTimer | None = None
        self._modules: list[TrackedModule] = []
        # Loaders may be read by other threads than the training thread: those do not delay the step.
        self._thread = 0
        # The optimizer whose steps are counted, and how often others have stepped since.
        self._main: int | None = None
        self._others: dict[int, int] = {}
        self._pending: deque[tuple[FinishedStep, PhaseEvents]] = deque()
        self._rows: list[tuple[FinishedStep, DevicePhaseTimes | None]] = []
        self._written = perf_counter_ns()
        self._counters = StepCounters()

    def _begin(self, phase: int) -> None:
        """The device's begin follows, once the other probes have launched their kernels."""
        self._host.begin(phase, self.context.job_ns())
        if self._device is not None:
            self._device.begin_own()

    def _begin_on_device(self, *phases: int) -> None:
        if self._device is not None:
            self._device.end_own()
            for phase in phases:
                self._device.begin(phase)

    def _end(self, phase: int) -> None:
        self._host.end(phase, self.context.job_ns())
        if self._device is not None:
            self._device.end(phase)

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._modules.append(tracked)
        if self._device is None:
            self._device = device_timer(tracked.tensors(tracked.parameters))
            if self._device is not None:
                self.context.call(self, Probe.backward_begun, Probe.gradients_ready)
                self.context.call_last(self)

    def wrapper_released(self, tracked: TrackedModule) -> None:
        if tracked in self._modules:
            self._modules.remove(tracked)

    def batch_requested(self, iterator: Any) -> None:
        if self._thread in (0, get_ident()):
            self._host.begin(DATA, self.context.job_ns())

    def batch_received(self, iterator: Any) -> None:
        if self._thread in (0, get_ident()):
            self._host.batch_received(self.context.job_ns())

    def loader_exhausted(self, iterator: Any) -> None:
        if self._thread in (0, get_ident()):
            self._host.loader_exhausted()

    def before_forward(self, tracked: TrackedModule) -> None:
        self._thread = get_ident()
        self._host.count_batches()
        now = self.context.job_ns()
        self._host.begin(FORWARD, now)
        # Buffers, if any, are synchronised before anything is computed.
        self._host.begin(BUFFERS, now)
        if self._device is not None:
            self._device.begin_own()

    def forward_begins(self, tracked: TrackedModule, *inputs: Any) -> None:
        self._begin_on_device(FORWARD, BUFFERS)

    def buffers_synced(self, tracked: TrackedModule) -> None:
        self._end(BUFFERS)
        self._own_begins()

    def after_forward(self, tracked: TrackedModule) -> None:
        self._end(FORWARD)

    def backward_called(self, root: Any = None) -> None:
        """Reentrant checkpointing calls backward inside backward: only the outermost counts."""
        if not torch_compat.in_backward():
            self._begin(BACKWARD)

    def backward_begins(self, root: Any = None) -> None:
        if not torch_compat.in_backward():
            self._begin_on_device(BACKWARD)

    def backward_begun(self, tracked: TrackedModule) -> None:
        self._own_begins()

    def gradients_ready(self, tracked: TrackedModule, *gradients: Any) -> None:
        self._own_begins()

    def gradients_computed(self, tracked: TrackedModule) -> None:
        # With several modules in one backward, the first: DDP may finish it before it reports the next.
        if not self._host.is_open(FINISH):
            self._begin(FINISH)

    def finish_begins(self, tracked: TrackedModule) -> None:
        if self._device is not None and self._device.is_open(FINISH):
            self.own_ends()
        else:
            self._begin_on_device(FINISH)

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        self._end(FINISH)
        self._own_begins()

    def backward_returned(self) -> None:
        if not torch_compat.in_backward():
            self._end(BACKWARD)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._begin(OPTIMIZER)

    def optimizer_begins(self, optimizer: TrackedOptimizer) -> None:
        self._begin_on_device(OPTIMIZER)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._end(OPTIMIZER)
        if self._ends_a_step(optimizer.index):
            self._close(optimizer.steps)
        if self._device is not None:
            self._device.begin_own()

    def own_ends(self, *_: Any) -> None:
        """Every other probe has handled the event."""
        if self._device is not None:
            self._device.end_own()

    def _own_begins(self) -> None:
        if self._device is not None:
            self._device.begin_own()

    def before_exit(self) -> None:
        self._drain()
        self._rows += [(row, UNKNOWN) for row, _ in self._pending]
        self._pending.clear()
        self._write()
        averages = averages_of(self._modules)
        if averages:
            self.context.write(ClockRecord(step=0, ddp=averages))
        self._counters.close()

    def _ends_a_step(self, optimizer: int) -> bool:
        """Several optimizers may share an iteration, and a job may replace its optimizer."""
        if optimizer == self._main:
            if self._others:
                self._others.clear()
            return True
        if self._main is None:
            self._main = optimizer
        if optimizer != self._main:
            self._others[optimizer] = self._others.get(optimizer, 0) + 1
            if self._others[optimizer] < REPLACES_MAIN:
                return False
            self._main = optimizer
        self._others.clear()
        return True

    def _close(self, step: int) -> None:
        now = self.context.job_ns()
        row = self._host.close(step, now, self.context.own_ns, self._counters.of_step(now))
        events = self._device.close() if self._device is not None else None
        if row is None:
            return
        if events is not None:
            self._pending.append((row, events))
            self._drain()
        else:
            self._rows.append((row, None if self._device is None else UNKNOWN))
        if len(self._rows) >= STEPS_PER_RECORD or perf_counter_ns() - self._written > NS_PER_RECORD:
            self._write()

    def _drain(self) -> None:
        """Read the events that the device has reached; never waits."""
        while self._pending and self._device is not None:
            row, events = self._pending[0]
            if events.ready():
                self._rows.append((row, events.read()))
                self.context.budget.add_device_time(events.own_ns)
                self._device.recycle(events)
            elif len(self._pending) > MAX_PENDING:
                self._rows.append((row, UNKNOWN))
            else:
                return
            self._pending.popleft()

    def _write(self) -> None:
        self._written = perf_counter_ns()
        rows, self._rows = self._rows, []
        while rows:
            # The steps of one record are consecutive.
            first = rows[0][0].step
            length = next((n for n, (row, _) in enumerate(rows) if row.step != first + n), len(rows))
            self.context.write_later(partial(record_of, rows[:length]))
            rows = rows[length:]


def record_of(rows: list[tuple[FinishedStep, DevicePhaseTimes | None]]) -> ClockRecord:
    host = [row.times() for row, _ in rows]
    device = [row for _, row in rows if row is not None]
    return ClockRecord(
        step=host[0].step,
        total=[row.total for row in host],
        data=[row.data for row in host],
        forward=[row.forward for row in host],
        backward=[row.backward for row in host],
        wait=[row.wait for row in host],
        optimizer=[row.optimizer for row in host],
        watching=[row.watching for row in host],
        queued=[row.queued for row in host],
        faults=[row.faults for row in host],
        kernel=[row.kernel for row in host],
        device={name: [getattr(row, name) for row in device] for name in DevicePhaseTimes._fields if device},
    )


def averages_of(modules: list[TrackedModule]) -> dict[str, int]:
    """DDP's own measurements, in microseconds over all modules; empty if this torch has none."""
    averages: dict[str, int] = {}
    for tracked in modules:
        logging_data = torch_compat.read(torch_compat.LOGGING_DATA, tracked.ddp())
        data = logging_data() if logging_data is not None else {}
        for name, key in DDP_AVERAGES.items():
            value = data.get(key)
            if isinstance(value, int) and value > 0:
                averages[name] = averages.get(name, 0) + value // 1000
    return averages
