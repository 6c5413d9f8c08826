"""A DDP module under watch: its tensors by name, in order, and whether that set changed since wrapping."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpcheck.records.schema import ModuleRecord

Holder = dict[str, Any]  # a submodule's own dict of parameters or buffers


@dataclass(frozen=True)
class Slot:
    """Where a tensor lives: looked up anew each time, since users replace tensors."""

    name: str
    holder: Holder
    key: str


@dataclass(frozen=True)
class Change:
    """A way in which the set of parameters is not what DDP was told of."""

    change: str
    parameter: str


@dataclass(eq=False)
class WatchedModule:
    """One DDP module. `ordinal` counts those wrapped in the same process group, so ranks agree on it."""

    index: int
    ordinal: int
    group: tuple[int, ...]
    module: weakref.ref[torch.nn.Module]
    ddp: weakref.ref[torch.nn.Module]
    ignored: frozenset[str]
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    forwards: int = 0
    # Synchronisations of the buffers: under no_sync ranks may come to the same one by different numbers of forwards.
    syncs: int = 0
    steps: int = 0
    stepped: bool = False
    joined: bool = False
    comm_hooks: int = 0
    # Replicas are meant to differ between averagings (post-localSGD): nothing to compare at each step.
    loose: bool = False
    parameters: list[Slot] = field(default_factory=list)
    buffers: list[Slot] = field(default_factory=list)
    # By optimizer, the places of the parameters it steps.
    owners: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What the reducer was built from: parameters that wanted gradients then.
        self._reduced: dict[int, str] = {}
        self._frozen: dict[int, torch.Tensor] = {}
        self._shape: list[tuple[dict[str, Any], int]] = []
        self._identities: list[tuple[Holder, str, Any, bool]] = []
        self.revision = 0
        self.catalogue()
        for slot in self.parameters:
            tensor = slot.holder[slot.key]
            if tensor.requires_grad:
                self._reduced[id(tensor)] = slot.name

    def catalogue(self) -> None:
        """List the tensors as they stand now, each once, in DDP's order."""
        module = self.module()
        if module is None:
            return
        self.parameters = list(_slots(module, "_parameters", self.ignored))
        self.buffers = list(_slots(module, "_buffers", self.ignored))
        self._shape = [
            (part, len(part))
            for child in module.modules()
            for part in (child._parameters, child._modules, child._buffers)
        ]
        self._identities = [
            (slot.holder, slot.key, slot.holder[slot.key], slot.holder[slot.key].requires_grad)
            for slot in self.parameters
        ]
        self.revision += 1

    def changes(self) -> list[Change]:
        """What changed since the last call and matters to the reducer; after any change lists anew."""
        if all(len(part) == count for part, count in self._shape) and all(
            (tensor := holder.get(key)) is old and tensor.requires_grad == wants
            for holder, key, old, wants in self._identities
        ):
            return []
        before = {
            slot.name: old for slot, (_, _, old, _) in zip(self.parameters, self._identities, strict=True)
        }
        wanted = {slot.name: row[3] for slot, row in zip(self.parameters, self._identities, strict=True)}
        self.catalogue()
        return list(self._compare(before, wanted))

    def _compare(self, before: dict[str, Any], wanted: dict[str, bool]) -> Iterable[Change]:
        for slot in self.parameters:
            tensor = slot.holder[slot.key]
            if not tensor.requires_grad or id(tensor) in self._reduced:
                continue
            old = before.get(slot.name)
            if old is None:
                yield Change("added", slot.name)
            elif old is not tensor:
                yield Change("replaced", slot.name)
            elif not wanted[slot.name]:
                yield Change("unfrozen", slot.name)

    @property
    def key(self) -> str:
        """The module's name across ranks."""
        return f"{','.join(map(str, self.group))}#{self.ordinal}"

    def forget(self) -> None:
        """The user let the module go: hold none of its tensors."""
        self.parameters, self.buffers, self._shape, self._identities = [], [], [], []

    def tensors(self, slots: list[Slot]) -> list[torch.Tensor]:
        return [slot.holder[slot.key] for slot in slots]

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
        )


def _slots(module: torch.nn.Module, attribute: str, ignored: frozenset[str]) -> Iterable[Slot]:
    """Tied tensors appear once, under their first name, as `named_parameters` has it."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        holder: Holder = getattr(child, attribute)
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
