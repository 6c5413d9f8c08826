"""Finds modules outside of DDP that take part in training steps without being trained, such as a frozen backbone.

In the first steps global hooks see every call of a module. They are never installed, or removed at once, in a job that
uses torch.compile: a compiler would trace them, and removing them would make it compile again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.agent.unwrapped import Ordinals, is_shard, nothing
from ddpcheck.guard import GUARD
from ddpcheck.patches import hide_from_compiler
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.modules import ModuleRole, UseEvidence

# Steps whose calls are observed. Calls before the first step do not count: they may belong to a validation.
OBSERVED_STEPS = 4
# Modules that are compared, and tensors whose identity is kept between two steps.
MAX_MODULES = 64
MAX_TENSORS = 256
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(eq=False)
class ModuleUse:
    """What is known of a module that was called."""

    module: weakref.ref[torch.nn.Module]
    where: str
    in_step: bool = False
    evidence: set[UseEvidence] = field(default_factory=set)


class UsedModules:
    """Observes calls of modules for the first steps, then lists those that were used in them."""

    def __init__(self) -> None:
        self.steps = 0
        self._handles: list[Any] = []
        self._ended = False
        # Ids of modules inside DDP or without parameters, and what is known of the others.
        self._skipped: set[int] = set()
        self._uses: dict[int, ModuleUse] = {}
        # Tensors of this step: what modules outside of DDP read and returned, and what DDP's forward read.
        self._read: list[tuple[weakref.ref[torch.Tensor], ModuleUse]] = []
        self._returned: list[tuple[weakref.ref[torch.Tensor], ModuleUse]] = []
        self._inputs: list[weakref.ref[torch.Tensor]] = []
        # Whether a training forward of DDP has run since the last backward.
        self._in_loss = False

    @property
    def observing(self) -> bool:
        return bool(self._handles)

    def begin(self, ddp: torch.nn.Module) -> None:
        """Called after a module was wrapped."""
        self._skipped.update(map(id, ddp.modules()))
        if self._handles or self._ended:
            return
        called = GUARD.protect("used_modules", "called", self._on_call)
        returned = GUARD.protect("used_modules", "returned", self._on_return)
        self._handles = [
            torch_module.register_module_forward_pre_hook(hide_from_compiler(called)),
            torch_module.register_module_forward_hook(hide_from_compiler(returned)),
        ]

    def end(self) -> None:
        """Remove the hooks, at the latest when the job begins to use a compiler."""
        self._ended = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget_step()

    def forward(self, inputs: Iterable[Any]) -> None:
        """A training forward of DDP begins."""
        self._in_loss = True
        for tensor in _tensors(inputs):
            for known, evidence in (
                (self._returned, UseEvidence.FEEDS_FORWARD),
                (self._read, UseEvidence.SHARES_INPUT),
            ):
                for other, use in known:
                    if _shares_memory(other(), tensor):
                        use.evidence.add(evidence)
            if len(self._inputs) < MAX_TENSORS:
                self._inputs.append(weakref.ref(tensor))

    def backward(self) -> None:
        self._in_loss = False

    def step_done(self) -> bool:
        """True once, when enough steps were observed."""
        self.steps += 1
        self._forget_step()
        if self.steps < OBSERVED_STEPS or not self._handles:
            return False
        self.end()
        return True

    def called_at(self, modules: Iterable[torch.nn.Module]) -> str:
        """Where one of these modules, or a module that contains it, was first called."""
        wanted = set(map(id, modules))
        for use in self._uses.values():
            module = use.module()
            if module is not None and any(id(child) in wanted for child in module.modules()):
                return use.where
        return ""

    def used(self) -> list[tuple[torch.nn.Module, ModuleUse]]:
        """The outermost modules outside of DDP that training steps have called."""
        alive = [
            (module, use)
            for use in self._uses.values()
            if use.in_step and (module := use.module()) is not None
        ]
        inner = {id(child) for module, _ in alive for child in module.modules() if child is not module}
        self._uses = {}
        return [(module, use) for module, use in alive if id(module) not in inner][:MAX_MODULES]

    def _on_call(self, module: torch.nn.Module, args: Any) -> None:
        use = self._use_of(module)
        if use is None:
            return
        if self.steps:
            use.in_step = True
        if self._in_loss:
            use.evidence.add(UseEvidence.IN_LOSS)
        for tensor in _tensors(args if isinstance(args, tuple) else (args,)):
            if any(_shares_memory(other(), tensor) for other in self._inputs):
                use.evidence.add(UseEvidence.SHARES_INPUT)
            if len(self._read) < MAX_TENSORS:
                self._read.append((weakref.ref(tensor), use))

    def _on_return(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        use = self._uses.get(id(module))
        if use is not None and len(self._returned) < MAX_TENSORS:
            self._returned += [(weakref.ref(tensor), use) for tensor in _tensors((output,))]

    def _use_of(self, module: torch.nn.Module) -> ModuleUse | None:
        identity = id(module)
        if identity in self._skipped:
            return None
        use = self._uses.get(identity)
        if use is not None and use.module() is module:
            return use
        if next(module.parameters(), None) is None:
            self._skipped.add(identity)
            return None
        use = self._uses[identity] = ModuleUse(weakref.ref(module), user_callsite())
        return use

    def _forget_step(self) -> None:
        self._read, self._returned, self._inputs = [], [], []
        self._in_loss = False


def track_used(
    module: torch.nn.Module,
    use: ModuleUse,
    trained: set[int],
    index: int,
    group: tuple[int, ...],
    ordinals: Ordinals,
) -> TrackedModule | None:
    """The parameters of the module that are not in `trained`; None if there is none, or one is sharded."""
    named = list(module.named_parameters(remove_duplicate=False))
    ignored = frozenset(name for name, tensor in named if id(tensor) in trained)
    rows = [(name, tensor) for name, tensor in named if name not in ignored]
    if not rows or any(type(tensor) not in _PLAIN or is_shard(tensor) for _, tensor in rows):
        return None
    name = type(module).__name__
    tracked = TrackedModule(
        index=index,
        ordinal=ordinals.of(ModuleRole.USED, name, rows),
        group=group,
        module=weakref.ref(module),
        ddp=nothing(),
        ignored=ignored,
        name=name,
        where=use.where,
        role=ModuleRole.USED,
        compared_live=False,
    )
    # Statistics and caches of such a module may differ between ranks.
    tracked.buffers = []
    return tracked


def _tensors(values: Iterable[Any], depth: int = 2) -> Iterator[torch.Tensor]:
    """The plain tensors in arguments or results, also inside of lists and dicts."""
    for value in values:
        if type(value) in _PLAIN:
            yield value
        elif depth and type(value) in (list, tuple):
            yield from _tensors(value, depth - 1)
        elif depth and type(value) is dict:
            yield from _tensors(value.values(), depth - 1)


def _shares_memory(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None:
        return False
    if one is other:
        return True
    if one.layout is not torch.strided or other.layout is not torch.strided or one.device != other.device:
        return False
    address = one.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()
