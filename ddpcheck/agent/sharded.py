"""Tracks the shards that an optimizer steps: DTensor parameters and those of FSDP1.

Ranks whose mesh coordinates differ only along replicated dimensions hold the same shards: these are compared like the
replicas of a DDP module. A parameter that no dimension replicates has no replica. It is only described.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.rank_context import RankContext
from ddpcheck.agent.sharded_backward import FlatBackward, PartialBackward, ShardedBackward
from ddpcheck.agent.tracked_module import ModuleContents, ParamSetChange, Slot, TrackedModule
from ddpcheck.agent.unwrapped import Ordinals, is_shard, live_modules, nothing, parameter_paths
from ddpcheck.guard import GUARD
from ddpcheck.probes.coverage import is_dtensor
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.sharded import DTENSOR
from ddpcheck.records.kinds.modules import (
    FIRST_SHARDED,
    FIRST_WITHOUT_REPLICA,
    PARTIAL,
    ModuleRecord,
    ModuleRole,
)

_grad = attrgetter("grad")
_local = attrgetter(torch_compat.LOCAL_TENSOR.name)
_local_gradient = attrgetter(f"grad.{torch_compat.LOCAL_TENSOR.name}")
_FSDP1 = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_REPLICAS, _SHARDS = "replicas", "shards"
# Steps in which the placements of gradients are compared with those of their parameters.
_CHECKED_STEPS = 2
# Ranks whose coordinates are recorded.
_MAX_COORDINATES = 1024
# Backwards in which gradients of shards are read, to see which other parameters they reach.
_OBSERVED_BACKWARDS = 16


@dataclass(frozen=True)
class ShardLayout:
    """How a parameter is distributed, seen from one rank."""

    # Ranks with the same shard, in ascending order, and all ranks that have a part of the parameter.
    replicas: tuple[int, ...]
    ranks: tuple[int, ...]
    # Names and sizes of the mesh dimensions, and the coordinates of each rank in `replicas`.
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coordinates: tuple[tuple[int, ...], ...]

    def record(self, kind: str) -> dict[str, Any]:
        """The field `mesh` of a module record."""
        rows = zip(self.replicas, self.coordinates, strict=True)
        return {
            "kind": kind,
            "dims": list(self.dims),
            "shape": list(self.shape),
            "coordinates": {
                str(rank): list(row) for rank, row in rows if len(self.replicas) <= _MAX_COORDINATES
            },
        }


def layout_of_dtensor(parameter: Any) -> ShardLayout | None:
    """None if this rank is not part of the mesh, or the value is a sum over ranks, or cannot be read."""
    mesh, placements = parameter.device_mesh, parameter.placements
    own = (
        mesh.get_coordinate() if torch_compat.read(torch_compat.LOCAL_TENSOR, parameter) is not None else None
    )
    if own is None or any(placement.is_partial() for placement in placements):
        return None
    replicated = [placement.is_replicate() for placement in placements]
    names = mesh.mesh_dim_names or tuple(f"dim{number}" for number in range(mesh.ndim))
    shape = tuple(mesh.shape)
    rows: list[tuple[int, tuple[int, ...]]] = []
    ranks = mesh.mesh.flatten().tolist()
    for number, rank in enumerate(ranks):
        coordinates = _unravel(number, shape)
        if all(free or here == mine for free, here, mine in zip(replicated, coordinates, own, strict=True)):
            rows.append((rank, coordinates))
    rows.sort()
    return ShardLayout(
        tuple(rank for rank, _ in rows),
        tuple(sorted(ranks)),
        tuple(names),
        shape,
        tuple(coordinates for _, coordinates in rows),
    )


def layout_beyond(parameter: Any, wide: Any) -> ShardLayout | None:
    """How ranks hold the shards of `parameter` on a larger mesh, whose further dimensions do not distribute it.

    `wide` is a parameter on that mesh. None if its mesh does not contain the mesh of `parameter`.
    """
    inner, outer = parameter.device_mesh, wide.device_mesh
    names, dims = inner.mesh_dim_names or (), outer.mesh_dim_names or ()
    own = outer.get_coordinate()
    if own is None or not set(names) < set(dims):
        return None
    within = [dims.index(name) for name in names]
    index = tuple(slice(None) if number in within else own[number] for number in range(outer.ndim))
    if sorted(outer.mesh[index].flatten().tolist()) != sorted(inner.mesh.flatten().tolist()):
        return None
    rows = []
    for number, rank in enumerate(outer.mesh.flatten().tolist()):
        coordinates = _unravel(number, tuple(outer.shape))
        if all(coordinates[dim] == own[dim] for dim in within):
            rows.append((rank, coordinates))
    rows.sort()
    return ShardLayout(
        tuple(rank for rank, _ in rows),
        tuple(sorted(outer.mesh.flatten().tolist())),
        tuple(dims),
        tuple(outer.shape),
        tuple(coordinates for _, coordinates in rows),
    )


def _unravel(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    coordinates = []
    for size in reversed(shape):
        number, coordinate = divmod(number, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def layouts_of_fsdp1(wanted: set[int]) -> dict[int, ShardLayout]:
    """By id, those of the parameters that FSDP1 has flattened. Looks at every object of the process once."""
    cls = getattr(sys.modules.get(_FSDP1[0]), _FSDP1[1], None)
    layouts: dict[int, ShardLayout] = {}
    if cls is None:
        return layouts
    for module in live_modules():
        handle = torch_compat.read(torch_compat.FSDP_HANDLE, module) if isinstance(module, cls) else None
        if handle is None:
            continue
        flat = handle.flat_param
        held = [flat, *(torch_compat.read(torch_compat.FLAT_ORIGINALS, flat) or ())]
        present = wanted.intersection(map(id, held))
        if present:
            layouts.update(zip(present, repeat(_layout_of_fsdp1(module))))
    return layouts


def _layout_of_fsdp1(module: Any) -> ShardLayout:
    distributed: Any = torch.distributed
    ranks = tuple(distributed.get_process_group_ranks(module.process_group))
    if module.sharding_strategy.name == "NO_SHARD":
        coordinates = tuple((number,) for number in range(len(ranks)))
        return ShardLayout(ranks, ranks, (_REPLICAS,), (len(ranks),), coordinates)
    rank = distributed.get_rank()
    group = torch_compat.read(torch_compat.FSDP_REPLICAS, module)
    if group is None:
        return ShardLayout((rank,), ranks, (_SHARDS,), (len(ranks),), ((ranks.index(rank),),))
    replicas = distributed.get_process_group_ranks(group)
    rows = sorted((other, (number, ranks.index(rank))) for number, other in enumerate(replicas))
    return ShardLayout(
        tuple(other for other, _ in rows),
        ranks,
        (_REPLICAS, _SHARDS),
        (len(replicas), len(ranks)),
        tuple(coordinates for _, coordinates in rows),
    )


@dataclass(eq=False)
class ShardedParameters(TrackedModule):
    """Shards of one optimizer that the same ranks hold."""

    slots: list[Slot] = field(default_factory=list)
    # Whether they are DTensors: then the local part of each one is read.
    distributed: bool = False
    # Of parameters without replica: name, dtype, shape and whether it is trained.
    described: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.backward = ShardedBackward(self)
        self._same_placements = True
        self._checks = 0

    def list_tensors(self) -> None:
        self.parameters, self.buffers = list(self.slots), []
        self._parameter_holders = [slot.holder for slot in self.parameters]
        self._parameter_keys = [slot.key for slot in self.parameters]
        self._tensors = self.stepped_objects()
        self._trainable = [tensor.requires_grad for tensor in self._tensors]
        self._contents = ModuleContents()
        self.revision += 1

    def refresh(self) -> list[ParamSetChange] | None:
        """The list follows the optimizer's groups, and a change of those makes a new module."""
        return None

    def stepped_objects(self) -> list[torch.Tensor]:
        return super().parameter_tensors()

    def tensors(self, slots: list[Slot]) -> list[torch.Tensor]:
        present: list[torch.Tensor] = [slot.holder[slot.key] for slot in slots]
        return list(map(_local, present)) if self.distributed else present

    def parameter_tensors(self) -> list[torch.Tensor]:
        objects = self.stepped_objects()
        return list(map(_local, objects)) if self.distributed else objects

    def gradients(self) -> list[torch.Tensor | None]:
        """Local gradients; none where they are not distributed like their parameters."""
        objects = self.stepped_objects()
        if not self.distributed:
            return list(map(_grad, objects))
        if self._checks < _CHECKED_STEPS:
            self._checks += 1
            self._same_placements = all(map(_is_placed_alike, objects))
        if not self._same_placements:
            return [None] * len(objects)
        try:
            return list(map(_local_gradient, objects))
        except AttributeError:
            # Some have no gradient.
            return [None if grad is None else _local(grad) for grad in map(_grad, objects)]

    def shard_names(self) -> list[str]:
        return [*super().shard_names(), *(str(row[0]) for row in self.described)]

    def record(self) -> ModuleRecord:
        record = super().record()
        return replace(record, parameters=self.described) if self.described else record

    def forget(self) -> None:
        super().forget()
        self.slots, self.without_replica = [], []


def _is_placed_alike(parameter: Any) -> bool:
    grad = parameter.grad
    return grad is None or getattr(grad, "placements", None) == parameter.placements


class ShardedTracker:
    """Owns the shards of each optimizer."""

    def __init__(self, context: RankContext, new_index: Callable[[], int]) -> None:
        self._context = context
        self._new_index = new_index
        self._ordinals = Ordinals()
        # By id of the optimizer: the ids of its shards, and their modules.
        self._known: dict[int, tuple[tuple[int, ...], list[TrackedModule]]] = {}
        self._on_released = GUARD.protect("agent", "forgotten", self._release, while_capturing=True)
        # How often FSDP1 has reduced gradients.
        self.flat_reductions = 0
        # Whether any optimizer has stepped shards.
        self.found = False
        # Backwards that are still observed, the gradients of all shards before the last one, and the result.
        self._observed = 0
        self._before: list[weakref.ref[torch.Tensor] | None] = []
        self._reached = False

    def of(self, optimizer: torch.optim.Optimizer) -> list[TrackedModule]:
        """The shards of the optimizer, one module for each set of ranks that hold the same ones."""
        if self._context.world_size == 1:
            return []
        shards = [
            (f"{type(optimizer).__name__}.group{number}.{position}", parameter)
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
            if is_shard(parameter)
        ]
        if not shards:
            self._release(id(optimizer))
            return []
        identities = tuple(id(parameter) for _, parameter in shards)
        known = self._known.get(id(optimizer))
        if known is not None and known[0] == identities:
            return known[1]
        if known is None:
            weakref.finalize(optimizer, self._on_released, id(optimizer)).atexit = False
        self._release(id(optimizer))
        modules = self._track(type(optimizer).__name__, shards)
        self._known[id(optimizer)] = identities, modules
        self.found = True
        for tracked in modules:
            self._context.emit(Probe.unwrapped_found, tracked)
        return modules

    def _track(self, name: str, shards: Sequence[tuple[str, torch.Tensor]]) -> list[TrackedModule]:
        names = short_names(shards)
        flat = {id(parameter) for _, parameter in shards if not is_dtensor(parameter)}
        layouts = layouts_of_fsdp1(flat) if flat else {}
        replicated: dict[tuple[bool, ShardLayout], dict[str, torch.Tensor]] = {}
        single: dict[tuple[int, ...], tuple[ShardLayout, dict[str, torch.Tensor]]] = {}
        partial: dict[ShardLayout, dict[str, torch.Tensor]] = {}
        wide = max((p for _, p in shards if is_dtensor(p)), key=_mesh_dims, default=None)
        for key, parameter in zip(names, (parameter for _, parameter in shards), strict=True):
            distributed = is_dtensor(parameter)
            layout = layout_of_dtensor(parameter) if distributed else layouts.get(id(parameter))
            if layout is None:
                continue
            if len(layout.replicas) > 1:
                replicated.setdefault((distributed, layout), {})[key] = parameter
            elif distributed and (beyond := layout_beyond(parameter, wide)) is not None:
                partial.setdefault(beyond, {})[key] = parameter
            else:
                single.setdefault(layout.ranks, (layout, {}))[1][key] = parameter
        return [
            *(self._module(name, *key, members) for key, members in replicated.items()),
            *(self._partial(name, layout, members, wide) for layout, members in partial.items()),
            *(self._without_replica(name, layout, members) for layout, members in single.values()),
        ]

    def _module(
        self, name: str, distributed: bool, layout: ShardLayout, members: dict[str, torch.Tensor]
    ) -> TrackedModule:
        slots = [Slot(key, members, key) for key in sorted(members)]
        rows = [(key, _local(members[key]) if distributed else members[key]) for key in sorted(members)]
        tracked = ShardedParameters(
            index=self._new_index(),
            ordinal=self._ordinals.of(ModuleRole.SHARDED, name, rows, FIRST_SHARDED),
            group=layout.replicas,
            module=nothing(),
            ddp=nothing(),
            ignored=frozenset(),
            name=name,
            role=ModuleRole.SHARDED,
            mesh=layout.record(_kind(distributed)),
            slots=slots,
            distributed=distributed,
        )
        if not distributed and self.flat_reductions:
            tracked.backward = FlatBackward(tracked, lambda: self.flat_reductions)
        return tracked

    def _partial(
        self, name: str, layout: ShardLayout, members: dict[str, torch.Tensor], wide: Any
    ) -> TrackedModule:
        """They may be replicas along the further dimensions of the mesh, or differ on purpose: the analysis judges."""
        rows = [(key, _local(members[key])) for key in sorted(members)]
        tracked = ShardedParameters(
            index=self._new_index(),
            ordinal=self._ordinals.of(ModuleRole.STEPPED, name, rows),
            group=layout.replicas,
            module=nothing(),
            ddp=nothing(),
            ignored=frozenset(),
            name=name,
            role=ModuleRole.STEPPED,
            compared_live=False,
            mesh=layout.record(PARTIAL),
            slots=[Slot(key, members, key) for key, _ in rows],
            distributed=True,
        )
        tracked.backward = PartialBackward(tracked, wide)
        return tracked

    def _without_replica(
        self, name: str, layout: ShardLayout, members: dict[str, torch.Tensor]
    ) -> TrackedModule:
        return ShardedParameters(
            index=self._new_index(),
            ordinal=self._ordinals.of(ModuleRole.SHARDED, name, [], FIRST_WITHOUT_REPLICA),
            group=layout.ranks,
            module=nothing(),
            ddp=nothing(),
            ignored=frozenset(),
            name=name,
            role=ModuleRole.SHARDED,
            mesh=layout.record(_kind(is_dtensor(next(iter(members.values()))))),
            described=[_row(key, members[key]) for key in sorted(members)],
            without_replica=[members[key] for key in sorted(members)],
        )

    def backward_called(self) -> None:
        """FSDP's forwards are not observed. Backwards take their place: ranks call as many of them before a step."""
        for _, modules in self._known.values():
            for tracked in modules:
                tracked.forwards += 1
        if self._observed > 0 and not self._reached:
            self._observed -= 1
            self._before = [None if grad is None else weakref.ref(grad) for grad in self._gradients()]

    def observe_backwards(self) -> None:
        """Parameters beside the shards are trained: find out whether the same backwards reach both."""
        self._observed = _OBSERVED_BACKWARDS

    def reached(self) -> bool:
        """Whether an observed backward has reached both; asked at the end of one that reaches other parameters."""
        if not self._reached and self._before:
            now = self._gradients()
            self._reached = len(now) == len(self._before) and any(
                grad is not None and (before is None or before() is not grad)
                for grad, before in zip(now, self._before, strict=True)
            )
            self._before = []
        return self._reached

    def _gradients(self) -> list[torch.Tensor | None]:
        modules = (tracked for _, each in self._known.values() for tracked in each)
        return [shard.grad for tracked in modules for shard in tracked.shards()]

    def _release(self, optimizer: int) -> None:
        """The optimizer was deleted, or its parameters have changed."""
        _, modules = self._known.pop(optimizer, ((), []))
        for tracked in modules:
            self._context.emit(Probe.wrapper_released, tracked)
            tracked.forget()


def _row(name: str, parameter: torch.Tensor) -> list[Any]:
    # The shape of a DTensor is that of the whole parameter; FSDP1 keeps a part of another size on each rank.
    shape = list(parameter.shape) if is_dtensor(parameter) else []
    return [name, str(parameter.dtype).removeprefix("torch."), shape, int(parameter.requires_grad)]


def _mesh_dims(parameter: Any) -> int:
    return int(parameter.device_mesh.ndim)


def _kind(distributed: bool) -> str:
    return DTENSOR if distributed else "fsdp"


def short_names(parameters: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """The path of each parameter in the outermost module, without that module where all are in one."""
    paths = parameter_paths({id(parameter) for _, parameter in parameters})
    names = [paths.get(id(parameter), position) for position, parameter in parameters]
    if len(paths) == len({id(parameter) for _, parameter in parameters}):
        short = [_without_root(name) for name in names]
        roots = {name.partition(".")[0] for name in names}
        names = short if len(roots) == 1 else names
    return names if len(set(names)) == len(names) else [position for position, _ in parameters]


def _without_root(name: str) -> str:
    return name.partition(".")[2] or name
