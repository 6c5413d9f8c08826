"""A tracked DDP module: its tensors by name, in order, and the changes of that set since wrapping."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter, getitem, is_not
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.backward_tracker import BackwardTracker
from ddpcheck.records.kinds.modules import LOCAL_SGD_HOOK, ModuleRecord, ModuleRole
from ddpcheck.torch_compat import PrivateName

_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_HOOKS_THAT_WRITE = {_HOOKS_OF_TORCH + name for name in ("optimizer_overlap_hooks", "mixed_precision_hooks")}
_grad = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")

Holder = dict[str, Any]  # a submodule's own dict of parameters or buffers


@dataclass(frozen=True)
class Slot:
    """Where a tensor is stored. It is looked up at each use, since programs replace tensors."""

    name: str
    holder: Holder
    key: str


@dataclass(frozen=True)
class ParamSetChange:
    """A difference between the module's parameters and those that DDP's reducer was built from."""

    change: str
    parameter: str


class ModuleContents:
    """What the dicts of a module held at one time. Comparing takes a few calls into C: it is done twice per step."""

    def __init__(self, holders: Iterable[Holder] = (), buffer_holders: Iterable[Holder] = ()) -> None:
        """`holders`: the dicts of submodules and parameters."""
        own, buffers = list(holders), list(buffer_holders)
        self._holders = [*own, *buffers]
        self._sizes = list(map(len, self._holders))
        self._filled = [holder for holder in own if holder]
        self._filled_buffers = [holder for holder in buffers if holder]
        self._all_filled = [*self._filled, *self._filled_buffers]
        self._names = list(chain.from_iterable(self._all_filled))
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self._names_and_values = [*self._names, *self._values]
        self._absent = self._absent_buffers()

    def _absent_buffers(self) -> list[bool]:
        buffers = chain.from_iterable(map(dict.values, self._filled_buffers))
        return [buffer is None for buffer in buffers]

    def changed(self) -> bool:
        """Replaced buffers do not matter: buffers are looked up at each use."""
        if list(map(len, self._holders)) != self._sizes:
            return True
        if self._filled_buffers and self._absent_buffers() != self._absent:
            return True
        names = chain.from_iterable(self._all_filled)
        values = chain.from_iterable(map(dict.values, self._filled))
        if not any(map(is_not, chain(names, values), self._names_and_values)):
            return False
        # A name may have been removed and added again as another object.
        values = chain.from_iterable(map(dict.values, self._filled))
        return list(chain.from_iterable(self._all_filled)) != self._names or any(
            map(is_not, values, self._values)
        )


@dataclass(eq=False)
class TrackedModule:
    """One DDP module. `ordinal` counts those wrapped in the same process group, so ranks agree on it."""

    index: int
    ordinal: int
    group: tuple[int, ...]
    module: weakref.ref[torch.nn.Module]
    ddp: weakref.ref[torch.nn.Module]
    ignored: frozenset[str]
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    role: ModuleRole = ModuleRole.DDP
    # Whether a mismatch is a fault for certain: then ranks compare digests during the run and record values.
    compared_live: bool = True
    forwards: int = 0
    # Whether the program has called `no_sync()` of this module. It may also set the flag itself.
    uses_no_sync: bool = False
    # Synchronisations of buffers: under no_sync, ranks may reach the same one after different numbers of forwards.
    syncs: int = 0
    steps: int = 0
    stepped: bool = False
    joined: bool = False
    # Whether `joined` or `comm_hooks` changed at the latest forward.
    wrapper_changed: bool = False
    # Names of the communication hooks, in the order of registration.
    comm_hooks: list[str] = field(default_factory=list)
    # Whether a communication hook may write to gradients before the backward ends, as one with an optimizer does.
    comm_hook_may_write: bool = False
    # Post-localSGD: replicas differ between averagings, so they are not compared at each step.
    uses_local_sgd: bool = False
    # The names of parameters that are held under other names, by the latter.
    renamed: dict[str, str] = field(default_factory=dict)
    # None until the module is wrapped, and with --gradients off.
    backward: BackwardTracker | None = None
    parameters: list[Slot] = field(default_factory=list)
    buffers: list[Slot] = field(default_factory=list)
    # By optimizer, the indices of the parameters that it steps.
    owners: dict[int, set[int]] = field(default_factory=dict)
    # Of shards: where they are on the device mesh, and the parameters of which no other rank holds the same part.
    mesh: dict[str, Any] = field(default_factory=dict)
    without_replica: list[torch.Tensor] = field(default_factory=list)
    # What the optimizer steps in place of these parameters, as ZeRO does: their values are copied back afterwards.
    copies: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Names, by id, of the parameters that the reducer was built with: those with requires_grad at that time.
        self._reduced: dict[int, str] = {}
        # Includes all names of tied parameters; `parameters` lists them once.
        self._contents = ModuleContents()
        self._parameter_holders: list[Holder] = []
        self._parameter_keys: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._trainable: list[bool] = []
        # Local shards of DTensor parameters, by name. DDP's reducer and the optimizer hold these objects. DDP puts
        # DTensors in their place for the forward, and not all versions of torch put the shards back.
        self._shards: dict[str, Any] = {}
        self._names: list[str] = []
        self.revision = 0
        self._uncounted_steps = 0
        self._window_ends = False
        self.list_tensors()
        for slot in self.parameters:
            tensor = slot.holder[slot.key]
            if tensor.requires_grad:
                self._reduced[id(tensor)] = slot.name

    def list_tensors(self) -> None:
        """List the current tensors, each once, in DDP's order."""
        module = self.module()
        if module is None:
            return
        self.parameters = self._with_shards(list(self._named(module)))
        self.buffers = list(named_slots(module, torch_compat.BUFFERS, self.ignored))
        children = list(module.modules())
        self._contents = ModuleContents(
            (
                torch_compat.read(name, child, {})
                for child in children
                for name in (torch_compat.SUBMODULES, torch_compat.PARAMETERS)
            ),
            (torch_compat.read(torch_compat.BUFFERS, child, {}) for child in children),
        )
        self._parameter_holders = [slot.holder for slot in self.parameters]
        self._parameter_keys = [slot.key for slot in self.parameters]
        self._tensors = [slot.holder[slot.key] for slot in self.parameters]
        self._trainable = [tensor.requires_grad for tensor in self._tensors]
        self.revision += 1

    def _named(self, module: torch.nn.Module) -> Iterable[Slot]:
        slots = named_slots(module, torch_compat.PARAMETERS, self.ignored)
        return (Slot(self.renamed.get(each.name, each.name), each.holder, each.key) for each in slots)

    def _with_shards(self, slots: list[Slot]) -> list[Slot]:
        """The parameters, with the local shard for each one that is a DTensor, in their first order."""
        self._names = self._names or [slot.name for slot in slots]
        for slot in slots:
            tensor = slot.holder[slot.key]
            if (
                slot.name not in self._shards
                and torch_compat.read(torch_compat.LOCAL_SHARD, tensor) is not None
            ):
                self._shards[slot.name] = tensor
                if tensor.requires_grad:
                    self._reduced[id(tensor)] = slot.name
        if not self._shards:
            return slots
        by_name = {slot.name: slot for slot in slots}
        by_name.update((name, Slot(name, self._shards, name)) for name in self._shards)
        known = [by_name.pop(name) for name in self._names if name in by_name]
        return [*known, *by_name.values()]

    def changes(self) -> list[ParamSetChange]:
        """Changes since the last call that concern the reducer. Any change updates the list of tensors."""
        if not self._changed():
            return []
        names = [slot.name for slot in self.parameters]
        before = dict(zip(names, self._tensors, strict=True))
        trainable = dict(zip(names, self._trainable, strict=True))
        self.list_tensors()
        return list(self._compare(before, trainable))

    def refresh(self) -> list[ParamSetChange] | None:
        """Update the list of tensors if the set has changed; None if it has not."""
        if not self._contents.changed() and list(map(_requires_grad, self._tensors)) == self._trainable:
            return None
        revision = self.revision
        changes = self.changes()
        return changes if self.revision != revision else None

    def refresh_at_forward(self) -> list[ParamSetChange] | None:
        """The same, and read what the user has set on DDP's wrapper since the last forward."""
        self.wrapper_changed = self._refresh_wrapper()
        return self.refresh()

    def _refresh_wrapper(self) -> bool:
        """Whether anything has changed."""
        ddp = self.ddp()
        begins_to_join = not self.joined and getattr(
            torch_compat.read(torch_compat.JOIN_CONFIG, ddp), "enable", False
        )
        hooks = torch_compat.read(torch_compat.COMM_HOOKS, ddp, ())
        if not begins_to_join and len(hooks) == len(self.comm_hooks):
            return False
        self.joined = self.joined or begins_to_join
        for hook, _ in hooks[len(self.comm_hooks) :]:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            self.comm_hooks.append(name)
            self.uses_local_sgd |= LOCAL_SGD_HOOK in name
            self.comm_hook_may_write |= not _writes_buckets_only(hook)
        return True

    @property
    def changes_since_wrapping(self) -> int:
        """How often the list of tensors was renewed."""
        return self.revision - 1

    @property
    def next_step(self) -> int:
        """The index of the next update without an optimizer, including those detected in the current event."""
        return self.steps + self._uncounted_steps

    def count_step(self) -> None:
        """An update without an optimizer was detected. It counts when all probes have handled the current event."""
        self._uncounted_steps += 1

    def end_window(self) -> None:
        """The forwards and backwards so far belong to a finished step, once the current event is handled."""
        self._window_ends = True

    def commit(self) -> None:
        """Called when all probes have handled the event: applies the steps that they detected."""
        self.steps += self._uncounted_steps
        self._uncounted_steps = 0
        if self._window_ends and self.backward is not None:
            self.backward.close_window()
        self._window_ends = False

    def _changed(self) -> bool:
        return self._contents.changed() or list(map(_requires_grad, self._tensors)) != self._trainable

    def _compare(self, before: dict[str, Any], trainable: dict[str, bool]) -> Iterable[ParamSetChange]:
        for slot in self.parameters:
            tensor = slot.holder[slot.key]
            if not tensor.requires_grad or id(tensor) in self._reduced:
                continue
            old = before.get(slot.name)
            if old is None:
                yield ParamSetChange("added", slot.name)
            elif old is not tensor:
                yield ParamSetChange("replaced", slot.name)
            elif not trainable[slot.name]:
                yield ParamSetChange("unfrozen", slot.name)

    def unknown_parameters(self) -> set[int]:
        """Indices of parameters that the reducer was not built with."""
        known = self._reduced
        return {index for index, tensor in enumerate(self._tensors) if id(tensor) not in known}

    @cached_property
    def key(self) -> str:
        """The name of the module, equal on all ranks."""
        return f"{','.join(map(str, self.group))}#{self.ordinal}"

    def forget(self) -> None:
        """DDP's wrapper was deleted: release its tensors and remove the hooks."""
        if self.backward is not None:
            self.backward.detach()
        self.parameters, self.buffers, self._tensors, self._trainable = [], [], [], []
        self._shards = {}
        self._parameter_holders, self._parameter_keys = [], []
        self._contents = ModuleContents()

    def tensors(self, slots: list[Slot]) -> list[torch.Tensor]:
        if slots is self.parameters and len(slots) == len(self._parameter_keys):
            return self.parameter_tensors()
        return [slot.holder[slot.key] for slot in slots]

    def parameter_tensors(self) -> list[torch.Tensor]:
        """The parameters as they are now, with one call into C."""
        try:
            return list(map(getitem, self._parameter_holders, self._parameter_keys))
        except KeyError:
            # Some programs take parameters out of their module for a forward: read those that were there before.
            slots = zip(self._parameter_holders, self._parameter_keys, self._tensors, strict=True)
            return [before if holder.get(key) is None else holder[key] for holder, key, before in slots]

    def stepped_objects(self) -> list[torch.Tensor]:
        """The parameters as an optimizer holds them."""
        return self.tensors(self.parameters)

    def shards(self) -> list[torch.Tensor]:
        """All parameters that it describes, as an optimizer holds them: also those without a replica."""
        return [*self.stepped_objects(), *self.without_replica]

    def shard_names(self) -> list[str]:
        return [slot.name for slot in self.parameters]

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradient of each parameter, with one call into C."""
        return list(map(_grad, self.parameter_tensors()))

    def sparse_parameters(self) -> set[int]:
        """Indices of the parameters whose gradients DDP expects to be sparse: weights of sparse embeddings."""
        module = self.module()
        embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        children = module.modules() if module is not None else ()
        sparse = {id(child.weight) for child in children if isinstance(child, embeddings) and child.sparse}
        return {index for index, tensor in enumerate(self._tensors) if id(tensor) in sparse}

    def checkpointed_buffers(self) -> list[int]:
        """Indices of floating-point buffers that a checkpoint contains, without caches and counters."""
        module = self.module()
        persistent: set[str] = set()
        for prefix, child in module.named_modules() if module is not None else ():
            non_persistent: set[str] = torch_compat.read(torch_compat.NON_PERSISTENT, child, set())
            buffers: Holder = torch_compat.read(torch_compat.BUFFERS, child, {})
            persistent |= {
                f"{prefix}.{key}" if prefix else key for key in buffers if key not in non_persistent
            }
        return [
            index
            for index, slot in enumerate(self.buffers)
            if slot.name in persistent and slot.holder[slot.key].is_floating_point()
        ]

    def record(self) -> ModuleRecord:
        return ModuleRecord(
            module=self.index,
            name=self.name,
            group=list(self.group),
            ordinal=self.ordinal,
            parameters=_rows(self.parameters),
            buffers=_rows(self.buffers),
            ignored=sorted(self.ignored),
            options=self.options,
            where=self.where,
            role=self.role.value,
            revision=self.changes_since_wrapping,
            mesh=self.mesh,
        )


def _writes_buckets_only(hook: Any) -> bool:
    """Whether this is a communication hook of torch that does not touch the gradients themselves."""
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "<locals>")
    # One that wraps another hook is a local function.
    return module.startswith(_HOOKS_OF_TORCH) and module not in _HOOKS_THAT_WRITE and "<locals>" not in name


def named_slots(
    module: torch.nn.Module, attribute: PrivateName, ignored: frozenset[str] = frozenset()
) -> Iterable[Slot]:
    """Tied tensors appear once, under their first name, as in `named_parameters`."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        holder: Holder = torch_compat.read(attribute, child, {})
        for key, tensor in holder.items():
            name = f"{prefix}.{key}" if prefix else key
            if tensor is None or id(tensor) in seen or name in ignored:
                continue
            seen.add(id(tensor))
            yield Slot(name, holder, key)


def _rows(slots: list[Slot]) -> list[list[Any]]:
    rows = []
    for slot in slots:
        tensor = slot.holder[slot.key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append([slot.name, dtype, list(tensor.shape), int(tensor.requires_grad)])
    return rows
