"""The phases of a step: what belongs to which phase, and that the time of ddpcheck does not count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
from ddpcheck.patches import Patches, around_next, calling
from ddpcheck.probes import step_timing
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.process.os_counters import ProcessorQueue
from ddpcheck.probes.process.step_phases import DevicePhaseTimer, device_timer
from ddpcheck.probes.step_timing import STEPS_PER_RECORD, StepTimingProbe
from ddpcheck.records.kinds.timing import ClockRecord
from ddpcheck.records.registry import to_line
from tests.helpers import fake_context
from tests.helpers.fake_context import FakeContext, Job
from tests.helpers.fake_device import FakeDevice
from tests.helpers.nested_backward import inside_backward

MILLI = 1_000_000


class Hands:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.ns = 1_000 * MILLI

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, milliseconds: float) -> None:
        self.ns += round(milliseconds * MILLI)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    made = Hands()
    monkeypatch.setattr(step_timing, "perf_counter_ns", made)
    monkeypatch.setattr(fake_context, "perf_counter_ns", made)
    return made


class Rank:
    """The probe alone, with events emitted by hand."""

    def __init__(self) -> None:
        self.context = FakeContext()
        self.module = torch.nn.Linear(2, 2)
        self.job = Job(self.module, self.context, probes=[StepTimingProbe])
        self.optimizer = self._optimizer(0)

    def _optimizer(self, index: int) -> TrackedOptimizer:
        return TrackedOptimizer(index, "SGD", lambda: None, ())  # type: ignore[arg-type]

    def emit(self, event: Callable[..., None], *args: Any) -> None:
        of_module = (
            "before_forward",
            "forward_inputs",
            "buffers_synced",
            "after_forward",
            "gradients_ready",
            "gradients_computed",
            "gradients_reduced",
        )
        if event.__name__ in of_module:
            more: dict[str, tuple[Any, ...]] = {"forward_inputs": ((), {}), "gradients_ready": ([], [])}
            args = (self.job.tracked, *more.get(event.__name__, ()))
        if event is Probe.backward_called and not args:
            args = (None,)
        self.context.emit(event, *args)

    def step(self, optimizer: TrackedOptimizer | None = None) -> None:
        chosen = optimizer or self.optimizer
        self.emit(Probe.before_step, chosen)
        self.emit(Probe.after_step, chosen)
        chosen.steps += 1

    def record(self) -> ClockRecord:
        """All steps so far, in one record."""
        self.emit(Probe.before_exit)
        [record] = self.context.of(ClockRecord)
        return record


@pytest.fixture
def rank(hands: Hands) -> Rank:
    made = Rank()
    # Nobody saw how the first step began.
    made.step()
    return made


def test_every_part_of_a_step(rank: Rank, hands: Hands) -> None:
    hands.pass_ms(1)
    rank.emit(Probe.batch_requested, None)
    hands.pass_ms(2)
    rank.emit(Probe.batch_received, None)
    hands.pass_ms(3)
    rank.emit(Probe.before_forward)
    hands.pass_ms(4)
    rank.emit(Probe.buffers_synced)
    hands.pass_ms(5)
    rank.emit(Probe.after_forward)
    hands.pass_ms(6)
    rank.emit(Probe.backward_called)
    hands.pass_ms(7)
    rank.emit(Probe.gradients_computed)
    hands.pass_ms(8)
    rank.emit(Probe.gradients_reduced)
    hands.pass_ms(9)
    rank.emit(Probe.backward_returned)
    hands.pass_ms(10)
    rank.emit(Probe.before_step, rank.optimizer)
    hands.pass_ms(11)
    rank.emit(Probe.after_step, rank.optimizer)
    record = rank.record()
    assert record.step == 1
    assert record.total == [66_000]
    assert (record.data, record.forward, record.backward) == ([2_000], [5_000], [16_000])
    # DDP synchronises buffers before a forward and gradients at the end of a backward.
    assert record.wait == [12_000]
    assert record.optimizer == [11_000]


def test_the_time_of_ddpcheck_does_not_count(rank: Rank, hands: Hands) -> None:
    rank.emit(Probe.before_forward)
    hands.pass_ms(5)
    # As the session counts it while probes work.
    rank.context.own_ns += 2 * MILLI
    rank.emit(Probe.after_forward)
    rank.step()
    record = rank.record()
    assert (record.total, record.forward, record.watching) == ([3_000], [3_000], [2_000])


def test_micro_batches_are_added_up(rank: Rank, hands: Hands) -> None:
    for _ in range(3):
        rank.emit(Probe.batch_requested, None)
        hands.pass_ms(1)
        rank.emit(Probe.batch_received, None)
        rank.emit(Probe.before_forward)
        hands.pass_ms(2)
        rank.emit(Probe.after_forward)
        rank.emit(Probe.backward_called)
        hands.pass_ms(4)
        rank.emit(Probe.backward_returned)
    rank.step()
    record = rank.record()
    assert (record.data, record.forward, record.backward) == ([3_000], [6_000], [12_000])


def test_a_backward_inside_a_backward_counts_once(rank: Rank, hands: Hands) -> None:
    rank.emit(Probe.before_forward)
    rank.emit(Probe.after_forward)
    rank.emit(Probe.backward_called)
    hands.pass_ms(1)

    def nested() -> None:
        rank.emit(Probe.backward_called)
        hands.pass_ms(2)
        rank.emit(Probe.backward_returned)

    inside_backward(nested)
    hands.pass_ms(4)
    rank.emit(Probe.backward_returned)
    rank.step()
    assert rank.record().backward == [7_000]


def test_two_modules_in_one_backward_wait_once(rank: Rank, hands: Hands) -> None:
    rank.emit(Probe.backward_called)
    rank.emit(Probe.gradients_computed)
    hands.pass_ms(3)
    rank.emit(Probe.gradients_computed)
    hands.pass_ms(2)
    rank.emit(Probe.gradients_reduced)
    rank.emit(Probe.gradients_reduced)
    rank.emit(Probe.backward_returned)
    rank.step()
    record = rank.record()
    assert (record.wait, record.backward) == ([5_000], [0])


def test_data_of_an_evaluation_does_not_count(rank: Rank, hands: Hands) -> None:
    for _ in range(3):
        rank.emit(Probe.batch_requested, None)
        hands.pass_ms(9)
        rank.emit(Probe.batch_received, None)
    rank.emit(Probe.loader_exhausted, None)
    rank.emit(Probe.batch_requested, None)
    hands.pass_ms(1)
    rank.emit(Probe.batch_received, None)
    rank.emit(Probe.before_forward)
    rank.step()
    assert rank.record().data == [1_000]


def test_a_loader_read_by_another_thread_costs_nothing(rank: Rank, hands: Hands) -> None:
    rank.emit(Probe.before_forward)

    def fetch() -> None:
        rank.emit(Probe.batch_requested, None)
        hands.pass_ms(9)
        rank.emit(Probe.batch_received, None)

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    rank.emit(Probe.before_forward)
    rank.step()
    assert rank.record().data == [0]


def test_several_optimizers_make_one_step(rank: Rank, hands: Hands) -> None:
    other = rank._optimizer(1)
    for _ in range(2):
        hands.pass_ms(3)
        rank.step(other)
        hands.pass_ms(4)
        rank.step()
    assert rank.record().total == [7_000, 7_000]


def test_a_new_optimizer_takes_over(rank: Rank, hands: Hands) -> None:
    rank.step()
    new = rank._optimizer(1)
    new.steps = 2
    for _ in range(4):
        hands.pass_ms(3)
        rank.step(new)
    rank.emit(Probe.before_exit)
    first, second = rank.context.of(ClockRecord)
    assert (first.step, second.step) == (1, 3)
    assert second.total == [6_000, 3_000, 3_000]


def test_a_step_costs_few_bytes(rank: Rank, hands: Hands) -> None:
    for _ in range(2 * STEPS_PER_RECORD):
        for event in (Probe.before_forward, Probe.buffers_synced, Probe.after_forward, Probe.backward_called):
            rank.emit(event)
            hands.pass_ms(12.345)
        rank.emit(Probe.gradients_computed)
        hands.pass_ms(12.345)
        rank.emit(Probe.gradients_reduced)
        rank.emit(Probe.backward_returned)
        rank.step()
    records = rank.context.of(ClockRecord)
    assert sum(len(record.total) for record in records) == 2 * STEPS_PER_RECORD
    assert sum(map(len, map(to_line, records))) / (2 * STEPS_PER_RECORD) < 100


class Event:
    """Stands in for a CUDA event: recorded when the host comes by, ready when a test says so.

    It has what a timed event of CUDA has and no more: to wait for it (`synchronize`, `wait`) would raise.
    """

    made = 0
    now_ms = 0.0
    ready_until_ms = 1e9
    # Numbers of events on another stream that is behind, and of those on another device.
    late: ClassVar[set[int]] = set()
    elsewhere: ClassVar[set[int]] = set()
    # The streams on which events were recorded.
    streams: ClassVar[set[str]] = set()

    def __init__(self, enable_timing: bool = True) -> None:
        assert enable_timing
        self.number = Event.made
        Event.made += 1
        self.at = 0.0

    def record(self, stream: str = "") -> None:
        Event.streams.add(stream)
        self.at = Event.now_ms

    def query(self) -> bool:
        return self.at <= Event.ready_until_ms and self.number not in Event.late

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        if (self.number in Event.elsewhere) != (end.number in Event.elsewhere):
            raise RuntimeError("CUDA error: invalid resource handle")
        return end.at - self.at


@pytest.fixture
def event() -> type[Event]:
    Event.made, Event.now_ms, Event.ready_until_ms = 0, 0.0, 1e9
    Event.late, Event.elsewhere, Event.streams = set(), set(), set()
    return Event


def device_step(rank: Rank) -> None:
    rank.emit(Probe.before_forward)
    for event in (
        Probe.forward_inputs,
        Probe.after_forward,
        Probe.backward_called,
        Probe.gradients_computed,
        Probe.gradients_reduced,
        Probe.backward_returned,
    ):
        rank.emit(event)
        Event.now_ms += 2.0
    rank.step()


def on_device(rank: Rank) -> StepTimingProbe:
    [probe] = rank.context.probes
    assert isinstance(probe, StepTimingProbe)
    probe._device = DevicePhaseTimer(Event, lambda event: event.record())
    # As after a module on a device was wrapped.
    rank.context.call(probe, Probe.backward_begun, Probe.gradients_ready)
    rank.step()
    return probe


def test_a_device_is_read_late(rank: Rank, event: type[Event]) -> None:
    probe = on_device(rank)
    event.ready_until_ms = -1.0
    device_step(rank)
    assert (len(probe._pending), len(probe._rows)) == (1, 1)
    event.ready_until_ms = 1e9
    device_step(rank)
    record = rank.record()
    assert record.device["total"] == [-1, 12_000, 12_000]
    assert record.device["forward"][1:] == [2_000, 2_000]
    assert record.device["wait"][1:] == [2_000, 2_000]
    assert record.device["backward"][1:] == [4_000, 4_000]


def test_an_event_on_another_stream_may_come_later(rank: Rank, event: type[Event]) -> None:
    probe = on_device(rank)
    # The first of the step, while the last of it is long there.
    event.late = {event.made}
    device_step(rank)
    assert (len(probe._pending), len(probe._rows)) == (1, 1)
    event.late = set()
    device_step(rank)
    assert rank.record().device["total"] == [-1, 12_000, 12_000]


def test_between_events_of_two_devices_there_is_no_time(rank: Rank, event: type[Event]) -> None:
    on_device(rank)
    event.elsewhere = {event.made}
    device_step(rank)
    event.elsewhere = set()
    device_step(rank)
    assert rank.record().device["total"] == [-1, -1, 12_000]


def test_events_are_used_again(rank: Rank, event: type[Event]) -> None:
    on_device(rank)
    for _ in range(5):
        device_step(rank)
    made = event.made
    for _ in range(50):
        device_step(rank)
    assert event.made == made


def test_events_of_a_device_that_is_far_behind_are_dropped(rank: Rank, event: type[Event]) -> None:
    probe = on_device(rank)
    event.ready_until_ms = -1.0
    for _ in range(step_timing.MAX_PENDING + 10):
        device_step(rank)
    assert len(probe._pending) <= step_timing.MAX_PENDING


class KernelsProbe(Probe):
    """Launches a kernel of a given length at each event, as a probe does that digests on the device."""

    lengths_ms: ClassVar[dict[str, float]] = {
        "before_forward": 0.5,
        "forward_inputs": 0.25,
        "gradients_ready": 1.0,
        "gradients_computed": 0.125,
        "gradients_reduced": 3.0,
        "before_step": 0.75,
        "after_step": 1.5,
    }

    def launch(self, name: str) -> None:
        Event.now_ms += self.lengths_ms[name]

    def before_forward(self, *_: Any) -> None:
        self.launch("before_forward")

    def forward_inputs(self, *_: Any) -> None:
        self.launch("forward_inputs")

    def gradients_ready(self, *_: Any) -> None:
        self.launch("gradients_ready")

    def gradients_computed(self, *_: Any) -> None:
        self.launch("gradients_computed")

    def gradients_reduced(self, *_: Any) -> None:
        self.launch("gradients_reduced")

    def before_step(self, *_: Any) -> None:
        self.launch("before_step")

    def after_step(self, *_: Any) -> None:
        self.launch("after_step")


def test_kernels_of_the_probes_are_no_part_of_the_step(rank: Rank, event: type[Event]) -> None:
    """The same step with and without a probe that launches kernels at every event."""
    on_device(rank)
    rank.context.probes.append(KernelsProbe(rank.context))
    for _ in range(2):
        rank.emit(Probe.before_forward)
        for each in (Probe.forward_inputs, Probe.after_forward, Probe.backward_called):
            rank.emit(each)
            event.now_ms += 2.0
        rank.emit(Probe.gradients_ready)
        for each in (Probe.gradients_computed, Probe.gradients_reduced, Probe.backward_returned):
            rank.emit(each)
            event.now_ms += 2.0
        rank.step()
    device = rank.record().device
    assert device["total"][1:] == [12_000, 12_000]
    assert device["forward"][1:] == [2_000, 2_000]
    assert device["backward"][1:] == [4_000, 4_000]
    assert device["wait"][1:] == [2_000, 2_000]
    assert device["optimizer"][1:] == [0, 0]


def test_a_model_on_a_gpu_is_timed_without_waiting_for_it(
    rank: Rank, event: type[Event], fake_device: FakeDevice
) -> None:
    """The model is on device 1 while device 0 is current; to wait for a device raises."""
    fake_device.Event = event
    clock = device_timer([fake_device.tensor(1)])
    assert clock is not None
    [probe] = rank.context.probes
    assert isinstance(probe, StepTimingProbe)
    probe._device = clock
    rank.step()
    for _ in range(3):
        device_step(rank)
    record = rank.record()
    assert record.device["total"] == [-1, 12_000, 12_000, 12_000]
    assert record.device["optimizer"][1:] == [0, 0, 0]
    assert event.streams == {"stream of cuda:1"}


def test_a_model_on_the_host_needs_no_events() -> None:
    assert device_timer([torch.zeros(2)]) is None


def test_time_in_line_for_a_processor(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("1000000 2000000 5\n")
    queue = ProcessorQueue(str(file))
    assert queue.since_last() == -1
    file.write_text("1000000 2750000 5\n")
    assert queue.since_last() == 750
    queue.close()
    assert ProcessorQueue(str(tmp_path / "none")).since_last() == -1


def test_the_loader_is_timed_and_unchanged(rank: Rank) -> None:
    calls: list[str] = []
    patches = Patches()
    observers = [lambda *_, name=name: calls.append(name) for name in ("requested", "received", "exhausted")]
    patches.replace(_BaseDataLoaderIter, "__next__", lambda take: around_next(take, *observers))
    try:
        loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    finally:
        patches.remove()
    assert calls == ["requested", "received", "requested", "received", "requested", "exhausted"]
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert len(calls) == 6


def test_tensor_backward_calls_the_patched_function() -> None:
    calls: list[str] = []
    patches = Patches()
    patches.replace(
        torch.autograd,
        "backward",
        lambda f: calling(f, lambda *a, **k: calls.append("called"), lambda *a, **k: calls.append("over")),
    )
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    finally:
        patches.remove()
    assert calls == ["called", "over"]
