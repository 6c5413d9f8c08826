"""Backwards under watch: which were reduced, why the others were not, and nothing of the user's kept."""

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

from ddpcheck.agent import backward_tracker
from ddpcheck.agent.backward_tracker import BackwardState, BackwardTracker
from ddpcheck.guard import Guard
from ddpcheck.probes.probe import Probe
from ddpcheck.records.reasons import UnsyncedReason
from tests.helpers.fake_context import watch

X = torch.ones(2, 3)


class Net(nn.Module):
    """Stands in for its own DDP wrapper too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.require_backward_grad_sync = True
        self.find_unused_parameters = False
        self.static_graph = False

    def forward(self, x: torch.Tensor, use_head: bool = True, nested: bool = False) -> torch.Tensor:
        # Reentrant checkpoints want an input with a gradient.
        own = x.clone().requires_grad_()
        x = checkpoint(self.body, own, use_reentrant=True) if nested else self.body(x)
        return self.head(x) if use_head else x


class Heard(list[tuple[Any, ...]]):
    """What the watch told."""

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
        raise ArithmeticError("half-way")


@pytest.fixture(autouse=True)
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """The guard swallows what fails: nothing may have."""
    guard = Guard()
    monkeypatch.setattr(backward_tracker, "GUARD", guard)
    yield guard
    assert not guard.off
    assert not guard._unreported


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def watching(net: Net, heard: Heard) -> BackwardTracker:
    tracked = watch(net)
    tracked.backward = BackwardTracker(tracked, heard)
    tracked.backward.attach()
    return tracked.backward


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counts(watching: BackwardTracker) -> tuple[int, int, int, int]:
    window = watching.window
    return window.armed, window.unarmed, window.synced, window.unsynced


def test_a_reduced_backward(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    watching.forward(armed=True)
    net(X).sum().backward()
    assert counts(watching) == (1, 0, 1, 0)
    assert (watching.window.last, watching.window.reason, watching.number) == (BackwardState.SYNCED, None, 1)
    assert (heard.events[0], *heard.events[-2:]) == (
        "backward_begun",
        "gradients_computed",
        "gradients_reduced",
    )
    # Each trainable parameter once; the frozen one comes first in the list of parameters.
    assert sorted(place for event, *(place,) in heard[1:-2]) == [1, 2, 3, 4]


def test_a_hook_of_the_user_s_that_came_later_is_heard_first(net: Net) -> None:
    """What it makes of a gradient is what DDP will take."""
    taken: list[float] = []
    order: list[str] = []

    def emit(event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if event is Probe.gradient_ready:
            taken.append(args[2].abs().max().item())
            order.append("ours")

    tracked = watch(net)
    tracked.backward = watching = BackwardTracker(tracked, emit)
    watching.attach()

    def one(parameter: torch.Tensor) -> None:
        order.append("one")

    def other(parameter: torch.Tensor) -> None:
        order.append("other")
        assert parameter.grad is not None
        parameter.grad.zero_()

    first, last = (net.head.bias.register_post_accumulate_grad_hook(hook) for hook in (one, other))
    for _ in range(2):
        net.zero_grad()
        taken.clear()
        order.clear()
        watching.forward(armed=True)
        net(X).sum().backward()
        assert order[:3] == ["one", "other", "ours"]
        assert taken[0] == 0.0
    first.remove()
    last.remove()
    watching.detach()
    assert not net.head.bias._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def test_nothing_happens_without_a_forward_with_gradients(watching: BackwardTracker, heard: Heard) -> None:
    watching.drain()
    watching.close_window()
    assert (counts(watching), watching.window.last, heard) == ((0, 0, 0, 0), BackwardState.NONE, [])


def test_no_sync(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    net.require_backward_grad_sync = False
    watching.forward(armed=False)
    net(X).sum().backward()
    assert (watching.window.last, watching.window.reason) == (BackwardState.UNSYNCED, UnsyncedReason.NO_SYNC)
    assert (counts(watching), heard.events) == ((0, 1, 0, 1), ["unsynced_backward_begun"])


def test_accumulation_ends_in_a_reduced_backward(net: Net, watching: BackwardTracker) -> None:
    for armed in (False, False, True):
        net.require_backward_grad_sync = armed
        watching.forward(armed)
        net(X).sum().backward()
    assert (counts(watching), watching.window.last) == ((1, 2, 1, 2), BackwardState.SYNCED)


def test_a_forward_inside_no_sync_and_its_backward_outside(net: Net, watching: BackwardTracker) -> None:
    watching.forward(armed=False)
    net(X).sum().backward()
    assert watching.window.reason is UnsyncedReason.FORWARD_IN_NO_SYNC


def test_a_wrapper_that_was_bypassed(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    net(X).sum().backward()
    assert (watching.window.last, watching.window.reason) == (BackwardState.UNSYNCED, UnsyncedReason.BYPASS)
    assert (counts(watching), watching.number, heard.events) == ((0, 0, 0, 1), 0, ["unsynced_backward_begun"])


def test_an_update_by_hand_that_shows_at_a_stray_backward_ends_the_step(net: Net, heard: Heard) -> None:
    """Else a wrapper that is bypassed from here on would look like a second backward on the last forward."""

    def emit(event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if event is Probe.unsynced_backward_begun:
            watching.close_window()

    watching = BackwardTracker(watch(net), emit)
    watching.attach()
    watching.forward(armed=True)
    net(X).sum().backward()
    net(X).sum().backward()
    assert (watching.window.last, watching.window.reason) == (BackwardState.UNSYNCED, UnsyncedReason.BYPASS)


def test_two_forwards_before_two_backwards(net: Net, watching: BackwardTracker) -> None:
    losses = []
    for _ in range(2):
        watching.forward(armed=True)
        losses.append(net(X).sum())
    losses[0].backward()
    assert watching.window.last is BackwardState.SYNCED
    losses[1].backward()
    assert (watching.window.last, watching.window.reason) == (
        BackwardState.UNSYNCED,
        UnsyncedReason.TWO_FORWARDS,
    )
    assert counts(watching) == (2, 0, 1, 1)


def test_a_second_backward_on_one_forward(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    watching.forward(armed=True)
    loss = net(X).sum()
    loss.backward(retain_graph=True)
    told = len(heard)
    loss.backward()
    assert (watching.window.last, watching.window.reason) == (
        BackwardState.UNSYNCED,
        UnsyncedReason.SECOND_BACKWARD,
    )
    assert (counts(watching), heard.events[told:]) == ((1, 0, 1, 1), ["unsynced_backward_begun"])


def test_a_reduction_that_still_waits(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    watching.forward(armed=True)
    net(X, use_head=False).sum().backward()
    assert "gradients_reduced" not in heard.events
    watching.drain()
    assert (watching.window.last, watching.window.waiting) == (BackwardState.UNFINISHED, (3, 4))
    names = [slot.name for slot in watching._tracked.parameters]
    assert [names[place] for place in watching.window.waiting] == ["head.weight", "head.bias"]


def test_what_is_settled_once_stays_settled(net: Net, watching: BackwardTracker) -> None:
    watching.forward(armed=True)
    net(X).sum().backward()
    watching.drain()
    watching.drain()
    assert (counts(watching), watching.window.last) == ((1, 0, 1, 0), BackwardState.SYNCED)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_reducer_that_finds_out_by_itself_waits_for_nothing(
    net: Net, watching: BackwardTracker, heard: Heard, option: str
) -> None:
    setattr(net, option, True)
    watching.forward(armed=True)
    net(X, use_head=False).sum().backward()
    assert (watching.window.last, heard.events[-1]) == (BackwardState.SYNCED, "gradients_reduced")


def test_two_backwards_that_fill_one_reduction(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    """Parts of one forward's graph: the reducer waits from the first to the second."""
    watching.forward(armed=True)
    middle = net.body(X)
    cut = middle.detach().requires_grad_()
    net.head(cut).sum().backward()
    assert cut.grad is not None
    assert "gradients_reduced" not in heard.events
    middle.backward(cut.grad)
    assert (watching.window.last, heard.events[-1], watching.number) == (
        BackwardState.SYNCED,
        "gradients_reduced",
        1,
    )
    assert heard.events.count("backward_begun") == 1


def test_nested_backwards_do_not_end_the_outer_one(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    watching.forward(armed=True)
    net(X, nested=True).sum().backward()
    assert len(watching._nested) == 1
    assert heard.events == [
        "backward_begun",
        *["gradient_ready"] * 4,
        "gradients_computed",
        "gradients_reduced",
    ]
    assert counts(watching) == (1, 0, 1, 0)


def test_where_only_nested_ones_have_gradients(watching: BackwardTracker, net: Net, heard: Heard) -> None:
    """The end of the outer backward is not seen; the next step tells that all gradients had come."""
    watching.reducer_indices -= {3, 4}
    net.head.requires_grad_(False)
    watching.forward(armed=True)
    net(X, nested=True).sum().backward()
    assert "gradients_reduced" not in heard.events
    watching.drain()
    assert (watching.window.last, counts(watching)) == (BackwardState.SYNCED, (1, 0, 1, 0))


def test_a_backward_that_raises_and_the_next_one(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    watching.forward(armed=True)
    with pytest.raises(ArithmeticError):
        net.head(Fails.apply(net.body(X))).sum().backward()
    assert heard.events == ["backward_begun", "gradient_ready", "gradient_ready"]
    watching.forward(armed=True)
    # Body's gradients never came.
    assert (watching.window.last, watching.window.waiting) == (BackwardState.UNFINISHED, (1, 2))
    heard.clear()
    net(X).sum().backward()
    assert heard.events == [
        "backward_begun",
        *["gradient_ready"] * 4,
        "gradients_computed",
        "gradients_reduced",
    ]
    assert (watching.window.last, watching.number) == (BackwardState.SYNCED, 2)


def test_a_step_closes_the_window(net: Net, watching: BackwardTracker) -> None:
    watching.forward(armed=True)
    net(X).sum().backward()
    watching.close_window()
    # It can still be read until something new begins.
    assert watching.window.last is BackwardState.SYNCED
    net(X).sum().backward()
    assert (counts(watching), watching.window.reason) == ((0, 0, 0, 1), UnsyncedReason.BYPASS)
    watching.close_window()
    watching.forward(armed=True)
    assert (counts(watching), watching.window.last) == ((1, 0, 0, 0), BackwardState.NONE)


def test_backwards_are_numbered_across_windows(net: Net, watching: BackwardTracker) -> None:
    for number in range(1, 4):
        watching.forward(armed=True)
        net(X).sum().backward()
        watching.close_window()
        assert watching.number == number
        net(X).sum().backward()
        assert watching.number == number


def test_nothing_grows(net: Net, watching: BackwardTracker) -> None:
    for _ in range(50):
        watching.forward(armed=True)
        net(X, nested=True).sum().backward()
        watching.close_window()
    assert len(watching._tasks) + len(watching._nested) + len(watching._fired) <= 6


def test_detach_removes_every_hook(net: Net, watching: BackwardTracker, heard: Heard) -> None:
    assert all(p._post_accumulate_grad_hooks for p in net.parameters() if p.requires_grad)
    watching.detach()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    watching.forward(armed=True)
    net(X).sum().backward()
    assert (heard, watching._handles) == ([], [])


def test_the_hooks_of_others_stay(net: Net, watching: BackwardTracker) -> None:
    seen: list[torch.Size] = []
    net.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    watching.detach()
    net(X).sum().backward()
    assert seen == [net.head.bias.shape]


def test_a_watch_that_is_gone_leaves_the_user_alone(net: Net, heard: Heard, guard: Guard) -> None:
    tracked = watch(net)
    watching = BackwardTracker(tracked, heard)
    watching.attach()
    watching.forward(armed=True)
    guard.entry_points.clear()
    gone = weakref.ref(watching)
    del watching
    gc.collect()
    assert gone() is None
    net(X).sum().backward()
    assert heard == []


def test_the_model_can_be_freed(heard: Heard) -> None:
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
def test_real_ddp_is_looked_at_just_before_and_just_after_it_reduces() -> None:
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
        if event is Probe.gradient_ready:
            local[args[1]] = args[2].clone()
        elif event is Probe.gradients_reduced:
            reduced.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    watching = BackwardTracker(tracked, emit)
    watching.attach()
    for number in (1, 2, 3):  # DDP rebuilds its buckets after the first
        local.clear()
        reduced.clear()
        model.zero_grad()
        watching.forward(armed=True)
        ddp(X).sum().backward()
        assert (watching.number, watching.window.last) == (number, BackwardState.SYNCED)
        assert len(reduced) == len(local) == 4
        assert any(tensor.abs().sum() > 0 for tensor in reduced)
        for place, tensor in enumerate(reduced):
            assert torch.equal(tensor, 3 * local[place])


@pytest.mark.usefixtures("group")
def test_real_ddp_with_reentrant_checkpoints_is_told_of_once(heard: Heard) -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    tracked = watch(net)
    tracked.ddp = weakref.ref(ddp)
    watching = BackwardTracker(tracked, heard)
    watching.attach()
    for _ in range(2):
        heard.clear()
        watching.forward(armed=True)
        ddp(X, nested=True).sum().backward()
        assert heard.events == [
            "backward_begun",
            *["gradient_ready"] * 4,
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
