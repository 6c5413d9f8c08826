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
from ddpcheck.agent.replicated import original_names
from ddpcheck.agent.shard_reduction import ShardReduction, ShardReductionReader, read_flat_reduction
from ddpcheck.agent.sharded import ShardedTracker
from ddpcheck.agent.sharded_roots import RootTracker, ShardedRoot
from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.agent.tracked_optimizer import (
    TrackedOptimizer,
    first_step,
    groups_of,
    inside_another_step,
    signature,
    steps_inside_backward,
)
from ddpcheck.agent.unwrapped_tracker import UnwrappedTracker
from ddpcheck.guard import GUARD
from ddpcheck.probes.digest.device_copy import copy_to_host
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.modules import PYTHON_REDUCER

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

    def __init__(
        self,
        context: RankContext,
        ddp_init: Callable[..., None],
        trains_unwrapped: Callable[[], None] = lambda: None,
    ) -> None:
        self.context = context
        # Called before the first step of a job that has not wrapped any module.
        self._trains_unwrapped = trains_unwrapped
        self._signature = inspect.signature(ddp_init)
        # By the id of DDP's wrapper: a dict of weak references takes a microsecond for each look-up.
        self._modules: dict[int, TrackedModule] = {}
        self._in_order: list[TrackedModule] = []
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, TrackedOptimizer | None]
        self._optimizers = weakref.WeakKeyDictionary()
        # Optimizers that stepped no DDP module when they had this signature.
        self._unknown: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]]
        self._unknown = weakref.WeakKeyDictionary()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._on_released = GUARD.protect("agent", "forgotten", self._release, while_capturing=True)
        self.sharded = ShardedTracker(context, self._new_index)
        self._roots = RootTracker(context, self._new_index)
        self._root_of = context.guarded("sharded_root", "find", self._find_root)
        self._roots_of = context.guarded("sharded_root", "stepped_by", self._roots.stepped_by)
        # Guarded under the names of the probes that record what these functions read.
        self._read_parameters = context.guarded("structure", "refresh", TrackedModule.refresh)
        self._read_at_forward = context.guarded(
            "structure", "refresh_at_forward", TrackedModule.refresh_at_forward
        )
        # An error here leaves DDP modules compared, and the shards not.
        self._shards_of = context.guarded("sharded", "of", self.sharded.of)
        self._reduction_reader: ShardReductionReader | None = None
        self._read_reduction = context.guarded("shard_reduction", "read", self._read_arguments)
        self._read_flat_reduction = context.guarded("shard_reduction", "read_flat", read_flat_reduction)
        # Whether FSDP has reduced gradients in the current backward.
        self._reducing = False
        self._read_hyperparameters = context.guarded("optimizers", "refresh", TrackedOptimizer.refresh)
        self._count = 0
        self._optimizer_count = 0
        self._step_count = 0
        # The optimizer whose step has begun, outside the step of another one: its id and its entry, until it ends.
        self._stepping = 0
        self._stepped: TrackedOptimizer | None = None
        self.unwrapped = UnwrappedTracker(context, self._new_index, self._in_order, self.sharded)

    def _new_index(self) -> int:
        self._count += 1
        return self._count - 1

    @property
    def wraps(self) -> bool:
        """Whether the job has wrapped a module in DDP, or trains shards."""
        return any(self._numbers.values()) or self.sharded.found

    def before_wrap(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Called before DDP's constructor: the instance has no attributes yet."""
        try:
            given = self._signature.bind_partial(ddp, *args, **kwargs).arguments
            group = _group_ranks(given)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            # Arguments that DDP refuses too: the constructor raises, and the program may call it again.
            return
        module = given.get("module")
        if not isinstance(module, torch.nn.Module):
            return
        ordinal = self._numbers.get(group, 0)
        self._numbers[group] = ordinal + 1
        original = original_names(module)
        tracked = TrackedModule(
            index=self._new_index(),
            ordinal=ordinal,
            group=group,
            module=weakref.ref(module),
            ddp=weakref.ref(ddp),
            ignored=_ignored(module, given),
            name=original.module or type(module).__name__,
            renamed=original.parameters,
            options={name: given[name] for name in _OPTIONS if name in given},
            where=user_callsite(),
        )
        if torch_compat.takes_python_reducer():
            tracked.options[PYTHON_REDUCER] = True
        weakref.finalize(ddp, self._on_released, tracked).atexit = False
        self._modules[id(ddp)] = tracked
        self._in_order.append(tracked)
        self.context.emit(Probe.before_wrap, tracked)
        if len(group) > 1:
            # Backends may end the process inside the constructor if ranks have parameters of different sizes.
            self.context.flush()

    def wrap_failed(self, ddp: torch.nn.Module) -> None:
        """DDP's constructor raised. The next module of the group gets the number of this one, as on other ranks."""
        tracked = self._modules.pop(id(ddp), None)
        if tracked is not None:
            self._numbers[tracked.group] = tracked.ordinal
            self._in_order.remove(tracked)
            tracked.forget()

    def _release(self, tracked: TrackedModule) -> None:
        """Called when the wrapper was deleted. The wrapped module may still exist and can be read one last time."""
        if tracked not in self._in_order:
            return
        self.context.emit(Probe.wrapper_released, tracked)
        tracked.forget()
        self._modules = {key: each for key, each in self._modules.items() if each is not tracked}
        self._in_order.remove(tracked)

    def _module_of(self, ddp: torch.nn.Module) -> TrackedModule | None:
        tracked = self._modules.get(id(ddp))
        # The id may belong to another object by now.
        return tracked if tracked is not None and tracked.ddp() is ddp else None

    def after_wrap(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        tracked = self._module_of(ddp)
        if tracked is None:
            return
        self._refresh(tracked)
        self.context.emit(Probe.after_wrap, tracked)
        if self.context.config.gradients != "off":
            tracked.backward = BackwardTracker(tracked, self.context.emit)
            tracked.backward.attach()
        self.unwrapped.wrapped(ddp)

    def _refresh(self, tracked: TrackedModule) -> None:
        """Renew the list of tensors before any probe reads it."""
        changes = self._read_parameters(tracked)
        if changes is not None:
            self.context.emit(Probe.parameters_changed, tracked, changes)

    def before_forward(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Only training forwards count: evaluation may run on one rank alone."""
        tracked = self._module_of(ddp)
        if tracked is not None and torch.is_grad_enabled():
            if tracked.backward is not None:
                tracked.backward.drain()
            # Before the forward is counted: earlier changes belong to earlier backwards.
            changes = self._read_at_forward(tracked)
            if changes is not None:
                self.context.emit(Probe.parameters_changed, tracked, changes)
            if tracked.wrapper_changed:
                self.context.emit(Probe.wrapper_changed, tracked)
            self.context.emit(Probe.before_forward, tracked)
            tracked.commit()
            if tracked.backward is not None:
                tracked.backward.forward(armed=bool(getattr(ddp, "require_backward_grad_sync", True)))
            self.context.emit(Probe.forward_inputs, tracked, args, kwargs)
            tracked.forwards += 1
            self.unwrapped.forward(args, kwargs)

    def no_sync_called(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        tracked = self._module_of(ddp)
        if tracked is not None:
            tracked.uses_no_sync = True

    def buffers_synced(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        # A buffer hook of the user may delay the work to the end of the backward, where it cannot be observed.
        # Not `hasattr`: for a missing attribute, a module first makes the text of an error.
        if "buffer_hook" in vars(ddp):
            return
        tracked = self._module_of(ddp)
        if tracked is not None and torch.is_grad_enabled():
            self.context.emit(Probe.buffers_synced, tracked)
            tracked.syncs += 1

    def forward_computed(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        tracked = self._module_of(ddp)
        # DDP searches for unused parameters then. Otherwise it has nothing to do that takes time.
        if tracked is not None and torch.is_grad_enabled() and tracked.options.get("find_unused_parameters"):
            self.context.emit(Probe.forward_computed, tracked)

    def after_forward(self, ddp: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        tracked = self._module_of(ddp)
        if tracked is not None and torch.is_grad_enabled():
            self.context.emit(Probe.after_forward, tracked)

    def sharding(self, *args: Any, **kwargs: Any) -> None:
        """FSDP has taken over parameters: from now on, loaders are observed."""
        if self.context.world_size > 1:
            self._trains_unwrapped()

    def root_forward(
        self,
        state: Any,
        module: torch.nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """FSDP begins a forward, perhaps inside another one."""
        if self.context.world_size == 1 or not torch.is_grad_enabled():
            return
        tracked = self._root_of((state, module))
        if tracked is not None:
            given = kwargs or {}
            self.context.emit(Probe.root_forward, tracked, args, given)
            self._roots.forward_begun(tracked)
            self.unwrapped.forward(args, given)

    def _find_root(self, given: tuple[Any, torch.nn.Module]) -> ShardedRoot | None:
        tracked, is_new = self._roots.of_forward(*given)
        if is_new and tracked is not None:
            self.context.emit(Probe.root_found, tracked)
            self.unwrapped.wrapped(given[1])
        return tracked

    def backward_called(self, tensors: Any = None, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        if not self._wrapped():
            self.context.emit(Probe.unwrapped_backward)
            if not self._roots.made:
                return
        for tracked in self._in_order:
            if tracked.backward is not None:
                tracked.backward.backward_called()
        self.sharded.backward_called()
        self._roots.backward_called()
        self.unwrapped.backward_called()
        # With weights of the user, the sum is not the loss.
        self.context.emit(Probe.backward_called, tensors if grad_tensors is None else None)

    def _read_arguments(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> ShardReduction | None:
        if self._reduction_reader is None:
            original = inspect.unwrap(torch_compat.lookup(torch_compat.FSDP_REDUCTION))
            self._reduction_reader = ShardReductionReader(original)
        return self._reduction_reader.read(*given)

    def shards_reducing(self, *args: Any, **kwargs: Any) -> None:
        if self.context.world_size == 1 or self.context.config.gradients == "off":
            return
        reduction = self._read_reduction((args, kwargs))
        if reduction is not None:
            self._reducing = True
            self.context.emit(Probe.shards_reducing, reduction)

    def flat_reducing(self, state: Any, handle: Any) -> None:
        """FSDP1 reduces the gradients of one flat parameter."""
        self.sharded.flat_reductions += 1
        if self.context.world_size == 1 or self.context.config.gradients == "off":
            return
        reduction = self._read_flat_reduction((state, handle))
        if reduction is not None:
            self._reducing = True
            self.context.emit(Probe.shards_reducing, reduction)

    def backward_returned(self, *args: Any, **kwargs: Any) -> None:
        # FSDP waits for its reductions at the end of the outermost backward.
        if self._reducing and not torch_compat.in_backward():
            self._reducing = False
            self.context.emit(Probe.shards_reduced)
        if self._wrapped() or self._roots.made:
            self.context.emit(Probe.backward_returned)

    def _wrapped(self) -> bool:
        """Whether the job has a module that is compared, or had one: wrapped, or stepped outside of DDP."""
        return bool(self._count > self._roots.made or self._in_order)

    def before_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        # A step that raised has not ended either: then the stack decides.
        if self._stepping and inside_another_step():
            return
        self._stepping = id(optimizer)
        self._stepped = tracked = self._tracked(optimizer)
        if tracked is None:
            return
        tracked.read_scale()
        for module in tracked.modules:
            if module.backward is not None:
                module.backward.before_step()
            self._refresh(module)
        self.context.emit(Probe.before_side_step if tracked.side else Probe.before_step, tracked)
        for module in tracked.modules:
            module.commit()

    def after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        # The end of an inner step, or of a step that began before ddpcheck did.
        if id(optimizer) != self._stepping:
            return
        self._stepping = 0
        self._step_count += 1
        # Not kept: the entry refers to parameters.
        tracked, self._stepped = self._stepped, None
        # Those of parameters outside of DDP are not in the list of modules.
        modules = self._in_order if tracked is None else [*self._in_order, *tracked.modules]
        self.context.emit(Probe.optimizer_stepped, optimizer, self._latest_signature, modules)
        if tracked is None:
            return
        self._read_hyperparameters(tracked)
        if tracked.side:
            self.context.emit(Probe.after_side_step, tracked)
        else:
            self.context.emit(Probe.after_step, tracked)
            self.context.budget.step_done(tracked.index, tracked.steps)
            self.context.step_done()
        tracked.steps += 1
        tracked.scaled, tracked.scale = False, None
        for module in tracked.modules:
            module.stepped = True
            module.steps = max(module.steps, tracked.steps)
            if module.backward is not None:
                module.backward.close_window()
        for root in tracked.roots:
            root.steps = max(root.steps, tracked.steps)
        if self.unwrapped.active:
            self.unwrapped.step_done(tracked, self._known_optimizers)

    def close(self) -> None:
        """Called before the context ends."""
        self.unwrapped.close(self._known_optimizers)

    def _known_optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self._optimizers, *self._unknown]

    def exchanged(self, *args: Any, **kwargs: Any) -> None:
        self.unwrapped.exchanged()

    def exchanged_in_backward(self, *args: Any, **kwargs: Any) -> None:
        if torch_compat.in_backward():
            self.unwrapped.exchanged()

    def batch_requested(self, iterator: Any) -> None:
        self.context.emit(Probe.batch_requested, iterator)

    def batch_received(self, iterator: Any, batch: Any) -> None:
        self.context.emit(Probe.batch_received, iterator)
        self.context.emit(Probe.batch_contents, iterator, batch)

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
            tracked.set_scale(None)
            if enabled:
                _copy_scale(scaler, optimizer, tracked)

    def scaler_after(self, scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        tracked = self._optimizers.get(optimizer)
        if tracked is not None and self._step_count == self._steps_before:
            tracked.read_scale()
            if not tracked.side:
                self.context.emit(Probe.step_skipped, tracked)
            tracked.scaled, tracked.scale = False, None

    _steps_before = 0
    # The optimizer that was asked for last.
    _latest_optimizer: weakref.ref[TrackedOptimizer] | None = None
    # Of the optimizer whose step began last.
    _latest_signature: tuple[int, ...] = ()

    def _tracked(self, optimizer: torch.optim.Optimizer) -> TrackedOptimizer | None:
        """The entry of the optimizer, updated if its parameters or those of a module have changed."""
        modules = self._in_order
        self._latest_signature = now = signature(optimizer, modules)
        # A dict of weak references takes a microsecond for each look-up.
        latest = self._latest_optimizer() if self._latest_optimizer is not None else None
        if latest is not None and latest.signature == now and latest.ref() is optimizer:
            # The same object, which probes keep instead of comparing it.
            self._latest_signature = latest.signature
            return latest
        known = self._optimizers.get(optimizer)
        if known is not None and known.signature == now:
            # Weak: it refers to parameters.
            self._latest_optimizer = weakref.ref(known)
            return known
        modules = list(modules)
        if known is None and self._unknown.get(optimizer) == now:
            return None
        groups = {tracked.index: groups_of(optimizer, tracked) for tracked in modules}
        stepped = [
            each for each in modules if any(index >= 0 for group in groups[each.index] for index in group)
        ]
        sharded = (not steps_inside_backward(optimizer) and self._shards_of(optimizer)) or []
        outside = None if steps_inside_backward(optimizer) else self.unwrapped.of(optimizer, modules)
        groups.update((each.index, groups_of(optimizer, each)) for each in sharded)
        stepped += sharded
        if (not stepped and outside is None) or steps_inside_backward(optimizer):
            self._unknown[optimizer] = now
            if known is not None:
                # Its DDP module was deleted: its parameters are no longer read.
                known.signature, known.modules = now, []
            return known
        if known is None:
            name = type(optimizer).__name__
            # Optimizers that some ranks have beside the job do not shift the numbers of the others.
            number = outside.ordinal if outside is not None and not stepped else self._optimizer_count
            known = TrackedOptimizer(number, name, weakref.ref(optimizer), now)
            known.steps = max((first_step(tracked, groups[tracked.index]) for tracked in stepped), default=0)
            self._optimizer_count += bool(stepped)
            self._optimizers[optimizer] = known
        known.side = not stepped and self.wraps
        known.roots = (self._roots_of(optimizer) or []) if sharded else []
        if not any(self._numbers.values()):
            self._trains_unwrapped()
        if outside is not None:
            groups[outside.index] = groups_of(optimizer, outside)
            stepped = [*stepped, outside]
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


def _copy_scale(scaler: Any, optimizer: torch.optim.Optimizer, tracked: TrackedOptimizer) -> None:
    """GradScaler's scale, read without waiting for a device.

    Before GradScaler steps, it waits until it knows whether gradients are finite. A copy that was started before that
    has arrived by then. A fused optimizer takes the scale on the device, and nothing waits.
    """
    scale = torch_compat.read(torch_compat.SCALE, scaler)
    if not isinstance(scale, torch.Tensor):
        return
    if scale.device.type == "cpu":
        tracked.set_scale(float(scale.item()))
    elif not torch_compat.read(torch_compat.AMP_SCALING, optimizer, False):
        tracked.pending_scale = copy_to_host(scale.detach().view(1, 1), in_order=True)
