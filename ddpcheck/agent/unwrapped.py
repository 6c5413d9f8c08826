"""Tracks the parameters that an optimizer steps and that no DDP module holds, as if they were a module."""

from __future__ import annotations

import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.backward_tracker import NO_TASK, BackwardTracker
from ddpcheck.agent.tracked_module import Holder, ModuleContents, ParamSetChange, Slot, TrackedModule
from ddpcheck.probes.coverage import is_dtensor
from ddpcheck.probes.probe import Emit, Probe
from ddpcheck.records.kinds.modules import COPIED, COPIED_IN_PARTS, FIRST_UNWRAPPED, ModuleRole
from ddpcheck.records.reasons import UnwrappedReason

# A tensor subclass, as sharding makes it, is another part on each rank.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Wrappers of other libraries that keep the shards of a rank as ordinary parameters.
_SHARDING_WRAPPERS = frozenset({"FullyShardedDataParallel"})
# The names under which torch.compile and FSDP1 hold the module that they wrap.
_WRAPPED_CHILDREN = frozenset(private.name for private in torch_compat.WRAPPED_CHILDREN)
# Bounds the way up to the root of a module tree.
_MAX_DEPTH = 100
# Elements that are added to each rank's part of a flat copy, and the share of a small model that they may be.
_PADDING, _PADDED_SHARE = 4096, 0.25
# Ordinals of unwrapped modules: a hash of their contents in this range.
_ORDINALS = 1 << 30


@dataclass(eq=False)
class UnwrappedParameters(TrackedModule):
    """Parameters of one optimizer outside of DDP. They are compared over all ranks of the default process group."""

    # Name, holder and key of each parameter, sorted by name.
    slots: list[Slot] = field(default_factory=list)

    def list_tensors(self) -> None:
        self.parameters, self.buffers = list(self.slots), []
        self._parameter_holders = [slot.holder for slot in self.parameters]
        self._parameter_keys = [slot.key for slot in self.parameters]
        self._tensors = self.tensors(self.parameters)
        self._trainable = [tensor.requires_grad for tensor in self._tensors]
        self._contents = ModuleContents()
        self.revision += 1

    def refresh(self) -> list[ParamSetChange] | None:
        """The list follows the optimizer's groups, and a change of those makes a new module."""
        return None

    def forget(self) -> None:
        super().forget()
        self.slots, self.copies = [], []


class UnwrappedBackward(BackwardTracker):
    """Notices whether a backward reaches these parameters together with those of a DDP module."""

    def __init__(
        self,
        tracked: UnwrappedParameters,
        emit: Emit,
        wrapped: Callable[[], Iterable[BackwardTracker]],
        exchanges: Callable[[], bool],
        reaches_shards: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(tracked, emit)
        self._reaches_shards = reaches_shards
        self._wrapped = wrapped
        self._exchanges = exchanges
        self._unwrapped = tracked
        # Whether any backward so far has reached these parameters and those of a DDP module.
        self._shared = False

    def _on_done(self, task: int) -> None:
        super()._on_done(task)
        self._emit(Probe.unreduced_gradients, self._unwrapped)

    def _why_unsynced(self) -> UnwrappedReason:
        task = self.last_task
        # Backwards inside this one, as checkpointing runs them, have larger ids.
        shared = task != NO_TASK and any(other.last_task >= task for other in self._wrapped())
        # Gradients of the generator's backward are often cleared before the discriminator's own step: the generator's
        # replicas depend on the discriminator all the same.
        self._shared = self._shared or shared or self._reaches_shards()
        if not self._shared:
            return UnwrappedReason.OWN_BACKWARD
        if self._exchanges():
            return UnwrappedReason.EXCHANGED
        # From now on these parameters are known to be replicas: mismatches are recorded with values.
        self._unwrapped.compared_live = True
        return UnwrappedReason.SHARED_BACKWARD


def unwrapped_parameters(
    optimizer: torch.optim.Optimizer, modules: Iterable[TrackedModule]
) -> list[tuple[str, torch.Tensor]]:
    """The parameters outside of all DDP modules, with a name by their position in the optimizer.

    Parameters that DDP ignores on request are inside.
    """
    inside: set[int] = set()
    for tracked in modules:
        inside.update(map(id, tracked.tensors(tracked.parameters)))
        module = tracked.module()
        if module is not None and tracked.ignored:
            inside.update(map(id, module.parameters()))
    name = type(optimizer).__name__
    return [
        (f"{name}.group{number}.{position}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in inside and type(parameter) in _PLAIN and not is_shard(parameter)
    ]


def is_shard(parameter: Any) -> bool:
    """Whether FSDP or a device mesh distributes the parameter. FSDP1 keeps shards as ordinary parameters."""
    return (
        is_dtensor(parameter)
        or torch_compat.read(torch_compat.FLAT_PARAMETER, parameter, False)
        or torch_compat.read(torch_compat.FLATTENED, parameter, False)
    )


class FoundSlots(NamedTuple):
    """Where parameters are held, sorted by name, the modules that hold them, and names of those inside of FSDP."""

    slots: list[Slot]
    modules: list[torch.nn.Module]
    inside_fsdp: list[str]


def find_slots(parameters: Sequence[tuple[str, torch.Tensor]]) -> FoundSlots:
    """A parameter that no module holds keeps its name by position. Shards are left out."""
    holders = _holders_of({id(parameter) for _, parameter in parameters})
    slots: dict[str, Slot] = {}
    modules: dict[int, torch.nn.Module] = {}
    inside: list[str] = []
    for position, parameter in parameters:
        held = holders.get(id(parameter))
        if held is None:
            slots[position] = Slot(position, {position: parameter}, position)
            continue
        if held.sharded:
            continue
        # Two modules of one class have the same path.
        name = held.name if held.name not in slots else f"{held.name} ({position})"
        slots[name] = Slot(name, held.holder, held.key)
        modules[id(held.module)] = held.module
        if held.managed:
            inside.append(name)
    return FoundSlots([slots[name] for name in sorted(slots)], list(modules.values()), sorted(inside))


class CopiedParameters(NamedTuple):
    """Parameters of which an optimizer steps copies."""

    slots: list[Slot]
    modules: list[torch.nn.Module]
    kind: str


def find_originals(
    optimizer: torch.optim.Optimizer, copies: Sequence[torch.Tensor], ranks: int
) -> CopiedParameters | None:
    """The parameters of a model that no optimizer holds, if `copies` have their size, or that of a rank's part of them.

    Optimizers that shard their state (ZeRO, DeepSpeed, Megatron) step flat parts, optimizers for half precision step
    copies in float32. Looks at every object of the process.
    """
    stepped = {
        id(parameter)
        for each in gc.get_objects()
        if issubclass(type(each), torch.optim.Optimizer)
        for group in getattr(each, "param_groups", ())
        for parameter in group["params"]
    }
    copied = sum(tensor.numel() for tensor in copies)
    matching = []
    for root in _roots(live_modules()):
        originals = [
            tensor for tensor in root.parameters() if tensor.requires_grad and id(tensor) not in stepped
        ]
        size = sum(tensor.numel() for tensor in originals)
        padding = min(ranks * _PADDING, int(_PADDED_SHARE * size) + ranks)
        in_parts = size <= copied * ranks <= size + padding
        if size and (copied == size or in_parts) and all(type(tensor) in _PLAIN for tensor in originals):
            matching.append((originals, COPIED if copied == size else COPIED_IN_PARTS))
    # A moving average has the same size, and no gradients.
    trained = [each for each in matching if any(tensor.grad is not None for tensor in each[0])]
    chosen = trained or matching
    if not chosen:
        return None
    name = type(optimizer).__name__
    tensors = [tensor for originals, _ in chosen for tensor in originals]
    by_identity = find_slots([(f"{name}.{number}", each) for number, each in enumerate(tensors)])
    if len(by_identity.slots) != len(tensors) or by_identity.inside_fsdp:
        return None
    return CopiedParameters(by_identity.slots, by_identity.modules, chosen[0][1])


def _roots(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that no other module contains."""
    inner = {
        id(child)
        for module in modules
        for child in torch_compat.read(torch_compat.SUBMODULES, module, {}).values()
    }
    return [module for module in modules if id(module) not in inner]


@dataclass(frozen=True)
class _Held:
    """The dict of a module that holds a parameter, and the path to it from the outermost module."""

    name: str
    module: torch.nn.Module
    holder: Holder
    key: str
    sharded: bool
    # Whether FSDP manages a module on the way.
    managed: bool


def _holders_of(wanted: set[int]) -> dict[int, _Held]:
    """By id of the parameter. Looks at every object of the process once, and only where parameters are outside DDP."""
    parents: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    holding: list[tuple[int, torch.nn.Module, Holder, str]] = []
    for module in live_modules():
        for key, child in torch_compat.read(torch_compat.SUBMODULES, module, {}).items():
            if child is not None:
                parents.setdefault(id(child), []).append((module, key))
        holder: Holder = torch_compat.read(torch_compat.PARAMETERS, module, {})
        holding += [
            (id(tensor), module, holder, key) for key, tensor in holder.items() if id(tensor) in wanted
        ]
    by_identity: dict[int, _Held] = {}
    wrappers = _fsdp_wrappers()
    for identity, module, holder, key in holding:
        path, chain = _path(module, parents)
        sharded, managed = any(map(_shards, chain)), any(isinstance(each, wrappers) for each in chain)
        held = _Held(f"{path}.{key}", module, holder, key, sharded, managed)
        known = by_identity.get(identity)
        # The same choice on every rank, whatever the order of the objects.
        if known is None or (held.sharded, held.name) > (known.sharded, known.name):
            by_identity[identity] = held
    return by_identity


def parameter_paths(wanted: set[int]) -> dict[int, str]:
    """By id, the path of each parameter that a module holds, from the outermost module."""
    return {identity: held.name for identity, held in _holders_of(wanted).items()}


def live_modules() -> list[torch.nn.Module]:
    known: dict[type, bool] = {}
    modules = []
    for each in gc.get_objects():
        # By type: `isinstance` would call code of objects that pretend to be of another class.
        kind = type(each)
        is_module = known.get(kind)
        if is_module is None:
            is_module = known[kind] = issubclass(kind, torch.nn.Module)
        if is_module:
            modules.append(each)
    return modules


def _fsdp_wrappers() -> tuple[type, ...]:
    """The classes of modules that FSDP1 and FSDP2 manage, as far as the program has imported them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    by_identity = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return tuple(cls for cls in by_identity if isinstance(cls, type))


def _path(
    module: torch.nn.Module, parents: dict[int, list[tuple[torch.nn.Module, str]]]
) -> tuple[str, list[torch.nn.Module]]:
    """The class of the outermost module and the way down from it, and all modules on the way."""
    keys: list[str] = []
    chain = [module]
    for _ in range(_MAX_DEPTH):
        above = parents.get(id(module))
        if not above:
            break
        module, key = min(above, key=lambda parent: (type(parent[0]).__name__, parent[1]))
        chain.append(module)
        if key not in _WRAPPED_CHILDREN:
            keys.append(key)
    return ".".join([type(module).__name__, *reversed(keys)]), chain


def _shards(module: torch.nn.Module) -> bool:
    cls = type(module)
    return cls.__name__ in _SHARDING_WRAPPERS and not cls.__module__.startswith("torch.")


class Ordinals:
    """Numbers for modules that ranks do not wrap in a common order, from what the modules contain.

    A module that only some ranks have does not shift the numbers of the others.
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def of(
        self,
        role: ModuleRole,
        name: str,
        rows: Iterable[tuple[str, torch.Tensor]],
        begin: int = FIRST_UNWRAPPED,
    ) -> int:
        """`begin`: the first number of the range."""
        content = repr((role.value, name, [(key, str(t.dtype), tuple(t.shape)) for key, t in rows]))
        digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
        first = begin + int.from_bytes(digest, "big") % _ORDINALS
        number = self._next.get(first, first)
        self._next[first] = number + 1
        return number


def track_unwrapped(
    optimizer: torch.optim.Optimizer,
    slots: list[Slot],
    index: int,
    group: tuple[int, ...],
    ordinals: Ordinals,
    where: str,
    mesh: dict[str, Any] | None = None,
) -> UnwrappedParameters:
    name = type(optimizer).__name__
    rows = [(slot.name, slot.holder[slot.key]) for slot in slots]
    return UnwrappedParameters(
        index=index,
        ordinal=ordinals.of(ModuleRole.STEPPED, name, rows),
        group=group,
        module=nothing(),
        ddp=nothing(),
        ignored=frozenset(),
        name=name,
        where=where,
        role=ModuleRole.STEPPED,
        compared_live=False,
        slots=slots,
        mesh=mesh or {},
    )


def nothing() -> weakref.ref[torch.nn.Module]:
    """A reference to a module that does not exist."""
    return weakref.ref(torch.nn.Module())
