"""Turns calls of DDP, optimizers, scalers and data loaders into events for the probes."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.backward_tracker import BackwardTracker
from ddpcheck.agent.rank_context import RankContext
from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.agent.tracked_optimizer import (
    TrackedOptimizer,
    first_step,
    groups_of,
    inside_another_step,
    signature,
    steps_inside_backward,
)
from ddpcheck.guard import GUARD
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.process.callsite import user_callsite

_OPTIONS = (
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "init_sync",
    "broadcast_buffers",
    "forward_sync_buffers",
    "bucket_cap_mb",
)


class Dispatcher:
    """Tracks the DDP modules and optimizers of this rank by weak references."""

    def __init__(self, context: RankContext, ddp_init: Callable[..., None]) -> None:
        self.context = context
        self._signature = inspect.signature(ddp_init)
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, TrackedModule] = weakref.WeakKeyDictionary()
        # The same modules: iterating over a dict of weak references takes microseconds.
        self._in_order: list[TrackedModule] = []
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, TrackedOptimizer | None]
        self._optimizers = weakref.WeakKeyDictionary()
        # Optimizers that stepped no DDP module when they had this signature.
        self._unknown: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]]
        self._unknown = weakref.WeakKeyDictionary()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._on_released = GUARD.protect("agent", "forgotten", self._release, while_capturing=True)
        # Guarded under the names of the probes that record what these functions read.
        self._read_parameters = context.guarded("structure", "refresh", TrackedModule.refresh)
        self._read_wrapper = context.guarded("structure", "refresh_wrapper", TrackedModule.refresh_wrapper)
        self._read_hyperparameters = context.guarded("optimizers", "refresh", TrackedOptimizer.refresh)
        self._count = 0
        self._optimizer_count = 0
        self._step_count = 0
        # The id of the optimizer whose step began last, outside the step of another one.
        self._stepping = 0

    def before_wrap(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Called before DDP's constructor: the instance has no attributes yet."""
        given = self._signature.bind_partial(ddp, *args, **kwargs).arguments
        module = given.get("module")
        if not isinstance(module, torch.nn.Module):
            return
        group = _group_ranks(given)
        ordinal = self._numbers.get(group, 0)
        self._numbers[group] = ordinal + 1
        tracked = TrackedModule(
            index=self._count,
            ordinal=ordinal,
            group=group,
            module=weakref.ref(module),
            ddp=weakref.ref(ddp),
            ignored=_ignored(module, given),
            name=type(module).__name__,
            options={name: given[name] for name in _OPTIONS if name in given},
            where=user_callsite(),
        )
        self._count += 1
        weakref.finalize(ddp, self._on_released, tracked).atexit = False
        self._modules[ddp] = tracked
        self._in_order.append(tracked)
        self.context.emit(Probe.before_wrap, tracked)

    def _release(self, tracked: TrackedModule) -> None:
        """Called when the wrapper was deleted. The wrapped module may still exist and can be read one last time."""
        self.context.emit(Probe.wrapper_released, tracked)
        tracked.forget()
        if tracked in self._in_order:
            self._in_order.remove(tracked)

    def after_wrap(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        tracked = self._modules.get(ddp)
        if tracked is None:
            return
        self._refresh(tracked)
        self.context.emit(Probe.after_wrap, tracked)
        if self.context.config.gradients != "off":
            tracked.backward = BackwardTracker(tracked, self.context.emit, self.context.timed)
            tracked.backward.attach()

    def _refresh(self, tracked: TrackedModule) -> None:
        """Renew the list of tensors before any probe reads it."""
        changes = self._read_parameters(tracked)
        if changes is not None:
            self.context.emit(Probe.parameters_changed, tracked, changes)

    def before_forward(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Only training forwards count: evaluation may run on one rank alone."""
        tracked = self._modules.get(ddp)
        if tracked is not None and torch.is_grad_enabled():
            if tracked.backward is not None:
                tracked.backward.drain()
            # Before the forward is counted: earlier changes belong to earlier backwards.
            self._read_wrapper(tracked)
            self._refresh(tracked)
            self.context.emit(Probe.before_forward, tracked)
            tracked.commit()
            if tracked.backward is not None:
                tracked.backward.forward(armed=bool(getattr(ddp, "require_backward_grad_sync", True)))
            self.context.emit(Probe.forward_inputs, tracked, args, kwargs)
            tracked.forwards += 1

    def buffers_synced(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        # A buffer hook of the user may delay the work to the end of the backward, where it cannot be observed.
        if hasattr(ddp, "buffer_hook"):
            return
        tracked = self._modules.get(ddp)
        if tracked is not None and torch.is_grad_enabled():
            self.context.emit(Probe.buffers_synced, tracked)
            tracked.syncs += 1

    def after_forward(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        tracked = self._modules.get(ddp)
        if tracked is not None and torch.is_grad_enabled():
            self.context.emit(Probe.after_forward, tracked)

    def backward_called(self, tensors: Any = None, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        for tracked in self._in_order:
            if tracked.backward is not None:
                tracked.backward.backward_called()
        # With weights of the user, the sum is not the loss.
        self.context.emit(Probe.backward_called, tensors if grad_tensors is None else None)

    def backward_returned(self, *args: Any, **kwargs: Any) -> None:
        self.context.emit(Probe.backward_returned)

    def before_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if inside_another_step():
            return
        self._stepping = id(optimizer)
        tracked = self._tracked(optimizer)
        if tracked is None:
            return
        for module in tracked.modules:
            if module.backward is not None:
                module.backward.drain()
            self._refresh(module)
        self.context.emit(Probe.before_step, tracked)
        for module in tracked.modules:
            module.commit()

    def after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        # The end of an inner step, or of a step that began before ddpcheck did.
        if id(optimizer) != self._stepping:
            return
        self._stepping = 0
        self._step_count += 1
        tracked = self._optimizers.get(optimizer)
        if tracked is None:
            return
        self._read_hyperparameters(tracked)
        self.context.emit(Probe.after_step, tracked)
        self.context.budget.step_done(tracked.index, tracked.steps)
        tracked.steps += 1
        tracked.scaled, tracked.scale = False, None
        for module in tracked.modules:
            module.stepped = True
            module.steps = max(module.steps, tracked.steps)
            if module.backward is not None:
                module.backward.close_window()

    def batch_requested(self, iterator: Any) -> None:
        self.context.emit(Probe.batch_requested, iterator)

    def batch_received(self, iterator: Any) -> None:
        self.context.emit(Probe.batch_received, iterator)

    def loader_exhausted(self, iterator: Any) -> None:
        self.context.emit(Probe.loader_exhausted, iterator)

    def sample_drawn(self, iterator: Any, index: Any) -> None:
        self.context.emit(Probe.sample_drawn, iterator, index)

    def sampler_exhausted(self, iterator: Any) -> None:
        self.context.emit(Probe.sampler_exhausted, iterator)

    def scaler_before(self, scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        self._steps_before = self._step_count
        tracked = self._tracked(optimizer)
        if tracked is not None:
            # A scaler that is switched off has no scale.
            enabled = scaler.is_enabled()
            tracked.scaled = enabled and isinstance(
                torch_compat.read(torch_compat.SCALE, scaler), torch.Tensor
            )
            tracked.scale = _scale(scaler, optimizer) if enabled else None

    def scaler_after(self, scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        tracked = self._optimizers.get(optimizer)
        if tracked is not None and self._step_count == self._steps_before:
            self.context.emit(Probe.step_skipped, tracked)
            tracked.scaled, tracked.scale = False, None

    _steps_before = 0

    def _tracked(self, optimizer: torch.optim.Optimizer) -> TrackedOptimizer | None:
        """The entry of the optimizer, updated if its parameters or those of a module have changed."""
        modules = list(self._in_order)
        now = signature(optimizer, modules)
        known = self._optimizers.get(optimizer)
        if known is not None and known.signature == now:
            return known
        if known is None and self._unknown.get(optimizer) == now:
            return None
        groups = {tracked.index: groups_of(optimizer, tracked) for tracked in modules}
        stepped = [
            each for each in modules if any(index >= 0 for group in groups[each.index] for index in group)
        ]
        if not stepped or steps_inside_backward(optimizer):
            self._unknown[optimizer] = now
            return known
        if known is None:
            name = type(optimizer).__name__
            known = TrackedOptimizer(self._optimizer_count, name, weakref.ref(optimizer), now)
            known.steps = max(first_step(tracked, groups[tracked.index]) for tracked in stepped)
            self._optimizer_count += 1
            self._optimizers[optimizer] = known
        known.signature, known.modules, known.groups = now, stepped, groups
        for tracked in stepped:
            tracked.owners[known.index] = known.owned(tracked)
        return known


def _group_ranks(given: dict[str, Any]) -> tuple[int, ...]:
    distributed: Any = torch.distributed
    group = given.get("process_group")
    if group is None and given.get("device_mesh") is not None:
        group = given["device_mesh"].get_group(mesh_dim=0)
    return tuple(distributed.get_process_group_ranks(group or distributed.group.WORLD))


def _ignored(module: torch.nn.Module, given: dict[str, Any]) -> frozenset[str]:
    """Names of tensors that DDP does not synchronise on the user's request: they may differ between ranks."""
    names = set(torch_compat.read(torch_compat.IGNORED_NAMES, module, ()))
    names.update(name for name, _ in given.get("delay_all_reduce_named_params") or ())
    return frozenset(names)


def _scale(scaler: Any, optimizer: torch.optim.Optimizer) -> float | None:
    """GradScaler's scale, or None if reading it would add a synchronisation with the device."""
    scale = torch_compat.read(torch_compat.SCALE, scaler)
    if not isinstance(scale, torch.Tensor):
        return None
    if scale.device.type != "cpu" and torch_compat.read(torch_compat.AMP_SCALING, optimizer, False):
        return None
    return float(scale.item())
