"""What a rank trains or uses beside its DDP modules: finds it, describes it to the probes, and says when it is due."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.module_copies import ModuleCopy, find_copy
from ddpcheck.agent.rank_context import RankContext
from ddpcheck.agent.sharded import ShardedTracker
from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
from ddpcheck.agent.unwrapped import (
    Ordinals,
    UnwrappedBackward,
    UnwrappedParameters,
    find_originals,
    find_slots,
    track_unwrapped,
    unwrapped_parameters,
)
from ddpcheck.agent.used_modules import UsedModules, track_used
from ddpcheck.guard import GUARD
from ddpcheck.probes.probe import Probe
from ddpcheck.records.kinds.modules import UseEvidence

# Kinds of parameters whose last tensors are remembered.
_MAX_RELEASED = 256


class UnwrappedTracker:
    """Owns the unwrapped parameters of each optimizer, and the modules that are used without being trained."""

    def __init__(
        self,
        context: RankContext,
        new_index: Callable[[], int],
        wrapped: Sequence[TrackedModule],
        sharded: ShardedTracker,
    ) -> None:
        self._sharded = sharded
        self._context = context
        self._new_index = new_index
        # The DDP modules of this rank; the dispatcher keeps the list up to date.
        self._wrapped = wrapped
        # The ranks of the default process group.
        self._group = tuple(range(context.world_size))
        self._ordinals = Ordinals()
        self._used_modules = UsedModules()
        # Parameters of live optimizers, by their id.
        self._stepped: dict[int, tuple[tuple[int, ...], UnwrappedParameters]] = {}
        # Steps of DDP modules before an optimizer's first one, by its id.
        self._begun: dict[int, int] = {}
        # Tensors of short-lived optimizers, by what describes them: the program may have made new ones of this kind.
        self._released: dict[tuple[str, ...], list[weakref.ref[torch.Tensor]]] = {}
        self._used: list[TrackedModule] = []
        # Those that have the parameters of a DDP module, until it is known where their values come from.
        self._copies: list[tuple[TrackedModule, ModuleCopy]] = []
        self._compiles = False
        self._exchanged = False
        # Whether something here waits for the end of steps.
        self.active = False
        self._steps = 0
        self._on_released = GUARD.protect("agent", "forgotten", self._release, while_capturing=True)
        self._on_deleted = GUARD.protect("agent", "forgotten", self._release_used, while_capturing=True)
        self._find = context.guarded("used_modules", "find", self._find_used)

    def wrapped(self, ddp: torch.nn.Module) -> None:
        """A module was wrapped: observe the calls of others in the first steps, unless they may be compiled."""
        if self._context.world_size == 1:
            return
        if self._compiles or torch_compat.compiler_in_use():
            self.compiler_used()
        else:
            self._used_modules.begin(ddp)
            self.active = True

    def compiler_used(self) -> None:
        self._compiles = True
        self._used_modules.end()
        self.active = bool(self._used)

    def close(self, known: Callable[[], Iterable[torch.optim.Optimizer]]) -> None:
        """The session ends, perhaps before all steps were observed that should have been."""
        if self._used_modules.observing:
            self._used_modules.end()
            self._find(known)
        for tracked, copy in self._copies:
            self._write_copy(tracked, copy)

    def exchanged(self) -> None:
        """Ranks send activations, or their gradients, to each other."""
        if not self._exchanged:
            self._exchanged = not _is_about_parameters()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._used_modules.observing:
            self._used_modules.forward((*args, *kwargs.values()))

    def backward_called(self) -> None:
        if self._used_modules.observing:
            self._used_modules.backward()
        for _, tracked in self._stepped.values():
            if tracked.backward is not None:
                tracked.backward.backward_called()

    def of(
        self, optimizer: torch.optim.Optimizer, modules: Sequence[TrackedModule]
    ) -> UnwrappedParameters | None:
        """The parameters of the optimizer that no DDP module holds; None if there is none, or only one rank."""
        if self._context.world_size == 1:
            return None
        parameters = unwrapped_parameters(optimizer, modules)
        identities = tuple(id(parameter) for _, parameter in parameters)
        known, tracked = self._stepped.get(id(optimizer), ((), None))
        if tracked is not None:
            if known == identities:
                return tracked
            self._release(id(optimizer))
        if not parameters:
            # Everything is wrapped, as in most jobs.
            return None
        slots, holders, inside = find_slots(parameters)
        if not slots:
            return None
        copies: list[torch.Tensor] = []
        originals = None
        if not holders and not self._wrapped and not self._sharded.found:
            tensors = [parameter for _, parameter in parameters]
            originals = find_originals(optimizer, tensors, self._context.world_size)
        if originals is not None:
            copies, slots, holders = tensors, originals.slots, originals.modules
        where = self._used_modules.called_at(holders)
        # Beside shards it matters whether FSDP leaves them out, or was not applied to their module.
        mesh: dict[str, Any] | None = {"inside": inside} if self._sharded.found or inside else None
        if originals is not None:
            mesh = {"kind": originals.kind}
        tracked = track_unwrapped(
            optimizer, slots, self._new_index(), self._group, self._ordinals, where, mesh
        )
        tracked.copies = copies
        if id(optimizer) not in self._stepped:
            weakref.finalize(optimizer, self._on_released, id(optimizer)).atexit = False
        self._stepped[id(optimizer)] = (identities, tracked)
        self._begun[id(optimizer)] = self._wrapped_steps()
        self._context.emit(Probe.unwrapped_found, tracked)
        before = self._released.get(_description(tracked), ())
        if before and not holders and all(tensor() is None for tensor in before):
            self._context.emit(Probe.module_used, tracked, [UseEvidence.RECREATED.value])
        # Gradients of copied parameters are local, those of the copies are parts.
        if self._context.config.gradients != "off" and not copies:
            tracked.backward = UnwrappedBackward(
                tracked,
                self._context.emit,
                self._backwards,
                lambda: self._exchanged,
                self._sharded.reached,
            )
            self._sharded.observe_backwards()
            tracked.backward.attach()
        return tracked

    def _backwards(self) -> Iterable[Any]:
        return [each.backward for each in self._wrapped if each.backward is not None]

    def _wrapped_steps(self) -> int:
        return max((each.steps for each in self._wrapped), default=0)

    def _release(self, optimizer: int) -> None:
        """The optimizer was deleted, or its parameters have changed."""
        _, tracked = self._stepped.pop(optimizer, ((), None))
        if tracked is not None:
            self._context.emit(Probe.wrapper_released, tracked)
            begun = self._begun.pop(optimizer, 0)
            # For a batch: until the step of the DDP module that follows.
            if self._wrapped_steps() <= begun + 1 and len(self._released) < _MAX_RELEASED:
                tensors = tracked.parameter_tensors()
                self._released[_description(tracked)] = list(map(weakref.ref, tensors))
            tracked.forget()

    def step_done(
        self, optimizer: TrackedOptimizer, known: Callable[[], Iterable[torch.optim.Optimizer]]
    ) -> None:
        """An optimizer has stepped. Only while something is `active`."""
        if optimizer.side:
            return
        self._steps += 1
        if self._used_modules.step_done():
            self._find(known)
            self.active = bool(self._used)
        for tracked in self._used:
            tracked.steps = self._steps - 1
            # At steps 4, 8, 16, ...: the cost does not grow with the length of the job.
            if self._steps & (self._steps - 1) == 0:
                self._context.emit(Probe.unwrapped_due, tracked)
        if self._copies:
            self._sample_copies()

    def _sample_copies(self) -> None:
        for _, copy in self._copies:
            if not copy.full:
                copy.sample()

    def _write_copy(self, tracked: TrackedModule, copy: ModuleCopy) -> None:
        evidence = copy.evidence()
        if evidence is not None:
            self._context.emit(Probe.module_used, tracked, [evidence.value])

    def _find_used(self, known: Callable[[], Iterable[torch.optim.Optimizer]]) -> None:
        trained = {
            id(parameter)
            for optimizer in known()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for wrapped in self._wrapped:
            module = wrapped.module()
            if module is not None:
                trained.update(map(id, module.parameters()))
        for module, use in self._used_modules.used():
            tracked = track_used(module, use, trained, self._new_index(), self._group, self._ordinals)
            if tracked is None:
                continue
            tracked.steps = self._steps - 1
            self._used.append(tracked)
            weakref.finalize(module, self._on_deleted, tracked).atexit = False
            self._context.emit(Probe.unwrapped_found, tracked)
            evidence = sorted(each.value for each in use.evidence)
            self._context.emit(Probe.module_used, tracked, evidence)
            copy = find_copy(tracked, self._wrapped)
            if copy is not None:
                self._copies.append((tracked, copy))

    def _release_used(self, tracked: TrackedModule) -> None:
        tracked.forget()
        if tracked in self._used:
            self._used.remove(tracked)
        for each, copy in self._copies:
            if each is tracked:
                copy.end()


def _description(tracked: TrackedModule) -> tuple[str, ...]:
    return tracked.name, *(slot.name for slot in tracked.parameters)


def _is_about_parameters() -> bool:
    """Whether a wrapper of torch, or its clipping of sharded gradients, issues the collective that is being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(torch_compat.PARAMETER_MODULES):
            return True
        frame = frame.f_back
    return False
