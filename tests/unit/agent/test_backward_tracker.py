"""Tracked backwards: which were reduced, why others were not, and no object of the program is kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpcheck import patches
from ddpcheck.agent import backward_tracker
from ddpcheck.agent.backward_tracker import BackwardState, BackwardTracker, HookKind
from ddpcheck.guard import Guard
from ddpcheck.probes.probe import Probe
from ddpcheck.records.reasons import UnsyncedReason
from tests.helpers.fake_context import watch

X = torch.ones(2, 3)


class Net(nn.Module):
    """A module that also has the attributes of a DDP wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.require_backward_grad_sync = True
        self.find_unused_parameters = False
        self.static_graph = False

    def forward(self, x: torch.Tensor, use_head: bool = True, nested: bool = False) -> torch.Tensor:
        # Reentrant checkpoints require an input with requires_grad.
        own = x.clone().requires_grad_()
        x = checkpoint(self.body, own, use_reentrant=True) if nested else self.body(x)
        return self.head(x) if use_head else x


class EventLog(list[tuple[Any, ...]]):
    """The events that the tracker emitted."""

    def __call__(self, event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.append((event.__name__, *args[1:2]))

    @property
    def events(self) -> list[str]:
        return [event for event, *_ in self]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("failed in backward")


@pytest.fixture(autouse=True)
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """The guard hides exceptions: check that none occurred."""
    guard = Guard()
    monkeypatch.setattr(patches, "GUARD", guard)
    yield guard
    assert not guard.off
    assert not guard._unreported


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def log() -> EventLog:
    return EventLog()


@pytest.fixture
def tracker(net: Net, log: EventLog) -> BackwardTracker:
    tracked = watch(net)
    tracked.backward = BackwardTracker(tracked, log)
    tracked.backward.attach()
    return tracked.backward


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counts(tracker: BackwardTracker) -> tuple[int, int, int, int]:
    window = tracker.window
    return window.armed, window.unarmed, window.synced, window.unsynced


def test_a_reduced_backward(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    tracker.forward(armed=True)
    net(X).sum().backward()
    assert counts(tracker) == (1, 0, 1, 0)
    assert (tracker.window.last, tracker.window.reason, tracker.number) == (BackwardState.SYNCED, None, 1)
    assert (log.events[0], *log.events[-2:]) == (
        "backward_begun",
        "gradients_computed",
        "gradients_reduced",
    )
    # All parameters together; index 0 is the frozen parameter.
    assert [list(indices) for event, *(indices,) in log[1:-2]] == [[0, 1, 2, 3, 4]]
    assert sorted(tracker.fired_order()) == [1, 2, 3, 4]


def test_later_hook_of_the_program_runs_first(net: Net) -> None:
    """DDP reduces the gradient that this hook has changed."""
    gradients: list[float] = []
    order: list[str] = []

    def emit(event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if event is Probe.gradients_ready:
            gradients.append(args[2][4].abs().max().item())
            order.append("tracker")

    tracked = watch(net)
    tracked.backward = tracker = BackwardTracker(tracked, emit)
    tracker.attach()

    def one(parameter: torch.Tensor) -> None:
        order.append("one")

    def other(parameter: torch.Tensor) -> None:
        order.append("other")
        assert parameter.grad is not None
        parameter.grad.zero_()

    first, last = (net.head.bias.register_post_accumulate_grad_hook(hook) for hook in (one, other))
    for _ in range(2):
        net.zero_grad()
        gradients.clear()
        order.clear()
        tracker.forward(armed=True)
        net(X).sum().backward()
        assert order == ["one", "other", "tracker"]
        assert gradients == [0.0]
    first.remove()
    last.remove()
    tracker.detach()
    assert not net.head.bias._post_accumulate_grad_hooks  # type: ignore[attr-defined]


class BucketView(Net):
    """Replaces each gradient directly after our hook, as DDP does with `gradient_as_bucket_view`."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_as_bucket_view = True


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_gradients_that_ddp_replaces_are_held(
    monkeypatch: pytest.MonkeyPatch, kept: bool, limit: int
) -> None:
    monkeypatch.setattr(backward_tracker, "MAX_HELD_BYTES", limit)
    net = BucketView()
    local: dict[int, torch.Tensor] = {}
    calls: list[int] = []

    def emit(event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if event is Probe.gradients_ready:
            calls.append(len(args[1]))
            local.update((index, gradient.clone()) for index, gradient in zip(*args[1:], strict=True))

    tracked = watch(net)
    tracked.backward = tracker = BackwardTracker(tracked, emit)
    tracker.attach()

    def divide(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if kept:
            parameter.grad.div_(2)
        else:
            parameter.grad = parameter.grad / 2

    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter) if kept and parameter.requires_grad else None
        tracker.forward(armed=True)
        # After ours, as DDP's own hook.
        handles = [p.register_post_accumulate_grad_hook(divide) for p in net.parameters() if p.requires_grad]
        local.clear()
        calls.clear()
        net(X).sum().backward()
        for handle in handles:
            handle.remove()
        assert sorted(local) == [1, 2, 3, 4]
        for index, parameter in enumerate(net.parameters()):
            if index:
                assert parameter.grad is not None
                assert torch.equal(local[index], 2 * parameter.grad)
        assert calls == ([1, 1, 1, 1] if kept or not limit else [4])


def test_hooks_are_called_where_a_backward_is_compiled(
    net: Net, tracker: BackwardTracker, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_tracker.torch_compat, "compiles_autograd", lambda: True)
    for number in (1, 2):
        tracker.forward(armed=True)
        tracker.backward_called()
        net(X).sum().backward()
        assert (tracker._hook_kind, tracker.number) == (HookKind.CALL, number)
    monkeypatch.undo()
    tracker.forward(armed=True)
    assert tracker._hook_kind is HookKind.LIST


def test_sparse_gradients_are_read_by_their_hook() -> None:
    """DDP divides a sparse gradient in place, directly after the hook."""

    class Words(Net):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 3, sparse=True)

    net = Words()
    local: dict[int, torch.Tensor] = {}
    calls: list[list[int]] = []

    def emit(event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if event is Probe.gradients_ready:
            calls.append(list(args[1]))
            local.update((index, gradient) for index, gradient in zip(*args[1:], strict=True))

    tracked = watch(net)
    tracked.backward = BackwardTracker(tracked, emit)
    tracked.backward.attach()
    tracked.backward.forward(armed=True)
    net(net.words(torch.tensor([1, 2]))).sum().backward()
    names = [slot.name for slot in tracked.parameters]
    sparse = names.index("words.weight")
    assert calls == [[sparse], [index for index in range(len(names)) if index != sparse]]
    assert local[sparse].is_sparse


def test_the_time_of_each_gradient(net: Net, tracker: BackwardTracker) -> None:
    tracker.time_gradients = True
    tracker.forward(armed=True)
    net(X).sum().backward()
    indices, times = zip(*tracker.ready_times, strict=True)
    assert (list(indices), sorted(indices)) == (tracker.fired_order(), [1, 2, 3, 4])
    assert list(times) == sorted(times)


def test_no_event_without_a_training_forward(tracker: BackwardTracker, log: EventLog) -> None:
    tracker.drain()
    tracker.close_window()
    assert (counts(tracker), tracker.window.last, log) == ((0, 0, 0, 0), BackwardState.NONE, [])


@pytest.mark.parametrize(
    ("by_context", "reason"), [(True, UnsyncedReason.NO_SYNC), (False, UnsyncedReason.FLAG_OFF)]
)
def test_no_sync(
    net: Net, tracker: BackwardTracker, log: EventLog, by_context: bool, reason: UnsyncedReason
) -> None:
    tracker._tracked.uses_no_sync = by_context
    net.require_backward_grad_sync = False
    tracker.forward(armed=False)
    net(X).sum().backward()
    assert (tracker.window.last, tracker.window.reason) == (BackwardState.UNSYNCED, reason)
    assert (counts(tracker), log.events) == (
        (0, 1, 0, 1),
        ["unsynced_backward_begun", "unsynced_gradients_ready"],
    )


def test_gradient_accumulation(net: Net, tracker: BackwardTracker) -> None:
    for armed in (False, False, True):
        net.require_backward_grad_sync = armed
        tracker.forward(armed)
        net(X).sum().backward()
    assert (counts(tracker), tracker.window.last) == ((1, 2, 1, 2), BackwardState.SYNCED)


@pytest.mark.parametrize(
    ("by_context", "reason"),
    [(True, UnsyncedReason.FORWARD_IN_NO_SYNC), (False, UnsyncedReason.FLAG_SWITCHED)],
)
def test_forward_inside_no_sync_and_backward_outside(
    net: Net, tracker: BackwardTracker, by_context: bool, reason: UnsyncedReason
) -> None:
    tracker._tracked.uses_no_sync = by_context
    tracker.forward(armed=False)
    net(X).sum().backward()
    assert tracker.window.reason is reason


def test_the_latest_forward_decides(net: Net, tracker: BackwardTracker) -> None:
    """The flag is switched between forward and backward, so that every second batch is reduced."""
    for armed in (True, False):
        tracker.forward(armed)
        net(X).sum().backward()
    assert tracker.window.reason is UnsyncedReason.FLAG_SWITCHED


def test_a_step_inside_the_backward(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    seen = []

    def step(parameter: torch.Tensor) -> None:
        tracker.before_step()
        seen.append((tracker.window.last, tracker.window.reason))
        tracker.close_window()

    first = next(parameter for parameter in net.parameters() if parameter.requires_grad)
    first.register_post_accumulate_grad_hook(step)
    tracker.forward(armed=True)
    net(X).sum().backward()
    assert seen == [(BackwardState.UNSYNCED, UnsyncedReason.IN_BACKWARD)]
    # The reduction comes after it, and is still observed.
    assert log.events[-1] == "gradients_reduced"


def test_a_step_after_the_backward(net: Net, tracker: BackwardTracker) -> None:
    tracker.forward(armed=True)
    net(X).sum().backward()
    tracker.before_step()
    assert (tracker.window.last, tracker.window.reason) == (BackwardState.SYNCED, None)


def test_bypassed_wrapper(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    net(X).sum().backward()
    assert (tracker.window.last, tracker.window.reason) == (BackwardState.UNSYNCED, UnsyncedReason.BYPASS)
    assert (counts(tracker), tracker.number, log.events) == (
        (0, 0, 0, 1),
        0,
        ["unsynced_backward_begun", "unsynced_gradients_ready"],
    )


def test_manual_update_before_an_unsynced_backward_ends_the_step(net: Net, log: EventLog) -> None:
    """Otherwise a bypassed wrapper would count as a second backward on the last forward."""

    def emit(event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if event is Probe.unsynced_backward_begun:
            tracker.close_window()

    tracker = BackwardTracker(watch(net), emit)
    tracker.attach()
    tracker.forward(armed=True)
    net(X).sum().backward()
    net(X).sum().backward()
    assert (tracker.window.last, tracker.window.reason) == (BackwardState.UNSYNCED, UnsyncedReason.BYPASS)


def test_two_forwards_before_two_backwards(net: Net, tracker: BackwardTracker) -> None:
    losses = []
    for _ in range(2):
        tracker.forward(armed=True)
        losses.append(net(X).sum())
    losses[0].backward()
    assert tracker.window.last is BackwardState.SYNCED
    losses[1].backward()
    assert (tracker.window.last, tracker.window.reason) == (
        BackwardState.UNSYNCED,
        UnsyncedReason.TWO_FORWARDS,
    )
    assert counts(tracker) == (2, 0, 1, 1)


def test_a_second_backward_on_one_forward(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    tracker.forward(armed=True)
    loss = net(X).sum()
    loss.backward(retain_graph=True)
    event_count = len(log)
    loss.backward()
    assert (tracker.window.last, tracker.window.reason) == (
        BackwardState.UNSYNCED,
        UnsyncedReason.SECOND_BACKWARD,
    )
    assert (counts(tracker), log.events[event_count:]) == (
        (1, 0, 1, 1),
        ["unsynced_backward_begun", "unsynced_gradients_ready"],
    )


def test_unfinished_reduction(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    tracker.forward(armed=True)
    net(X, use_head=False).sum().backward()
    assert "gradients_reduced" not in log.events
    tracker.drain()
    assert (tracker.window.last, tracker.window.waiting) == (BackwardState.UNFINISHED, (3, 4))
    names = [slot.name for slot in tracker._tracked.parameters]
    assert [names[index] for index in tracker.window.waiting] == ["head.weight", "head.bias"]


def test_drain_twice_has_no_effect(net: Net, tracker: BackwardTracker) -> None:
    tracker.forward(armed=True)
    net(X).sum().backward()
    tracker.drain()
    tracker.drain()
    assert (counts(tracker), tracker.window.last) == ((1, 0, 1, 0), BackwardState.SYNCED)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_reducer_that_detects_unused_parameters_finishes(
    net: Net, tracker: BackwardTracker, log: EventLog, option: str
) -> None:
    setattr(net, option, True)
    tracker.forward(armed=True)
    net(X, use_head=False).sum().backward()
    assert (tracker.window.last, log.events[-1]) == (BackwardState.SYNCED, "gradients_reduced")


def test_two_backwards_in_one_reduction(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    """Each covers one half of the graph of one forward. The reducer finishes in the second."""
    tracker.forward(armed=True)
    middle = net.body(X)
    cut = middle.detach().requires_grad_()
    net.head(cut).sum().backward()
    assert cut.grad is not None
    assert "gradients_reduced" not in log.events
    middle.backward(cut.grad)
    assert (tracker.window.last, log.events[-1], tracker.number) == (
        BackwardState.SYNCED,
        "gradients_reduced",
        1,
    )
    assert log.events.count("backward_begun") == 1


def test_nested_backwards_do_not_end_the_outer_one(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    tracker.forward(armed=True)
    net(X, nested=True).sum().backward()
    assert len(tracker._nested) == 1
    assert log.events == [
        "backward_begun",
        # All were computed when the nested backward ended.
        "gradients_ready",
        "gradients_computed",
        "gradients_reduced",
    ]
    assert counts(tracker) == (1, 0, 1, 0)


def test_parameters_that_have_another_place_since_wrapping(net: Net, tracker: BackwardTracker) -> None:
    """Hooks know the order of the wrapping, probes that of the module."""
    tracked = tracker._tracked
    assert tracker.reducer_indices == {1, 2, 3, 4}
    body = net.body
    del net.body
    net.renamed = body
    tracked.refresh()
    assert [slot.name for slot in tracked.parameters] == [
        "frozen",
        "head.weight",
        "head.bias",
        "renamed.weight",
        "renamed.bias",
    ]
    tracker.forward(armed=True)
    net.head(net.renamed(X)).sum().backward()
    assert tracker.fired_order()[:2] in ([1, 2], [2, 1])
    assert sorted(tracker.fired_order()) == [1, 2, 3, 4]
    tracked.module().head.requires_grad_(False)
    assert tracker.reducer_indices == {1, 2, 3, 4}


def test_gradients_only_in_nested_backwards(tracker: BackwardTracker, net: Net, log: EventLog) -> None:
    """The end of the outer backward is not observed. `drain` detects that all gradients are complete."""
    tracker._reducer_positions -= {3, 4}
    net.head.requires_grad_(False)
    tracker.forward(armed=True)
    net(X, nested=True).sum().backward()
    assert "gradients_reduced" not in log.events
    tracker.drain()
    assert (tracker.window.last, counts(tracker)) == (BackwardState.SYNCED, (1, 0, 1, 0))


def test_backward_after_one_that_raised(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    tracker.forward(armed=True)
    with pytest.raises(ArithmeticError):
        net.head(Fails.apply(net.body(X))).sum().backward()
    assert log.events == ["backward_begun"]
    tracker.forward(armed=True)
    # The body got no gradients.
    assert (tracker.window.last, tracker.window.waiting) == (BackwardState.UNFINISHED, (1, 2))
    log.clear()
    net(X).sum().backward()
    assert log.events == ["backward_begun", "gradients_ready", "gradients_computed", "gradients_reduced"]
    assert (tracker.window.last, tracker.number) == (BackwardState.SYNCED, 2)


def test_a_step_closes_the_window(net: Net, tracker: BackwardTracker) -> None:
    tracker.forward(armed=True)
    net(X).sum().backward()
    tracker.close_window()
    # It can be read until the next forward or backward.
    assert tracker.window.last is BackwardState.SYNCED
    net(X).sum().backward()
    assert (counts(tracker), tracker.window.reason) == ((0, 0, 0, 1), UnsyncedReason.BYPASS)
    tracker.close_window()
    tracker.forward(armed=True)
    assert (counts(tracker), tracker.window.last) == ((1, 0, 0, 0), BackwardState.NONE)


def test_backwards_are_numbered_across_windows(net: Net, tracker: BackwardTracker) -> None:
    for number in range(1, 4):
        tracker.forward(armed=True)
        net(X).sum().backward()
        tracker.close_window()
        assert tracker.number == number
        net(X).sum().backward()
        assert tracker.number == number


def test_sets_do_not_grow(net: Net, tracker: BackwardTracker) -> None:
    for _ in range(50):
        tracker.forward(armed=True)
        net(X, nested=True).sum().backward()
        tracker.close_window()
    assert len(tracker._tasks) + len(tracker._nested) + len(tracker._fired) <= 6


def test_detach_removes_every_hook(net: Net, tracker: BackwardTracker, log: EventLog) -> None:
    assert all(p._post_accumulate_grad_hooks for p in net.parameters() if p.requires_grad)
    tracker.detach()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    tracker.forward(armed=True)
    net(X).sum().backward()
    assert (log, tracker._handles) == ([], [])


def test_detach_keeps_hooks_of_the_program(net: Net, tracker: BackwardTracker) -> None:
    shapes: list[torch.Size] = []
    net.head.bias.register_post_accumulate_grad_hook(lambda p: shapes.append(p.shape))
    tracker.detach()
    net(X).sum().backward()
    assert shapes == [net.head.bias.shape]


def test_deleted_tracker_emits_no_events(net: Net, log: EventLog, guard: Guard) -> None:
    tracked = watch(net)
    tracker = BackwardTracker(tracked, log)
    tracker.attach()
    tracker.forward(armed=True)
    guard.entry_points.clear()
    tracker_ref = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert tracker_ref() is None
    net(X).sum().backward()
    assert log == []


def test_the_model_can_be_freed(log: EventLog) -> None:
    net = Net()
    tracked = watch(net)
    weakref.finalize(net, tracked.forget).atexit = False
    tracked.backward = BackwardTracker(tracked, lambda *_: None)
    tracked.backward.attach()
    tracked.backward.forward(armed=True)
    net(X).sum().backward()
    freed = [weakref.ref(net), weakref.ref(net.body), weakref.ref(net.head.weight)]
    del net
    gc.collect()
    assert [ref() for ref in freed] == [None, None, None]


@pytest.mark.usefixtures("group")
def test_real_ddp_gradients_before_and_after_the_reduction() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    ddp = DistributedDataParallel(model)

    def tripled(state, bucket):  # type: ignore[no-untyped-def]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        return future

    ddp.register_comm_hook(None, tripled)
    tracked = watch(model)
    tracked.ddp = weakref.ref(ddp)
    local: dict[int, torch.Tensor] = {}
    reduced: list[torch.Tensor] = []

    def emit(event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if event is Probe.gradients_ready:
            local.update((index, gradient.clone()) for index, gradient in zip(*args[1:], strict=True))
        elif event is Probe.gradients_reduced:
            reduced.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    tracker = BackwardTracker(tracked, emit)
    tracker.attach()
    for number in (1, 2, 3):  # DDP rebuilds its buckets after the first
        local.clear()
        reduced.clear()
        model.zero_grad()
        tracker.forward(armed=True)
        ddp(X).sum().backward()
        assert (tracker.number, tracker.window.last) == (number, BackwardState.SYNCED)
        assert len(reduced) == len(local) == 4
        assert any(tensor.abs().sum() > 0 for tensor in reduced)
        for index, tensor in enumerate(reduced):
            assert torch.equal(tensor, 3 * local[index])


@pytest.mark.usefixtures("group")
def test_real_ddp_with_reentrant_checkpoints_emits_each_event_once(log: EventLog) -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    tracked = watch(net)
    tracked.ddp = weakref.ref(ddp)
    tracker = BackwardTracker(tracked, log)
    tracker.attach()
    for _ in range(2):
        log.clear()
        tracker.forward(armed=True)
        ddp(X, nested=True).sum().backward()
        assert log.events == [
            "backward_begun",
            "gradients_ready",
            "gradients_computed",
            "gradients_reduced",
        ]


@pytest.mark.usefixtures("group")
def test_real_ddp_is_freed() -> None:
    net = nn.Linear(3, 1)
    ddp = DistributedDataParallel(net)
    tracked = watch(net)
    tracked.ddp = weakref.ref(ddp)
    weakref.finalize(ddp, tracked.forget).atexit = False
    tracked.backward = BackwardTracker(tracked, lambda *_: None)
    tracked.backward.attach()
    tracked.backward.forward(armed=True)
    ddp(X).sum().backward()
    freed = [weakref.ref(ddp), weakref.ref(net), weakref.ref(net.weight)]
    del net, ddp
    gc.collect()
    assert [ref() for ref in freed] == [None, None, None]
