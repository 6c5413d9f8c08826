"""Tracks the outermost modules that FSDP shards: their forwards, buffers and modes are those of a DDP module.

The parameters themselves are tracked as shards, by the optimizer that steps them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.rank_context import RankContext
from ddpcheck.agent.tracked_module import ModuleContents, ParamSetChange, TrackedModule, named_slots
from ddpcheck.agent.unwrapped import Ordinals
from ddpcheck.guard import GUARD
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.probes.sharded import DTENSOR
from ddpcheck.records.kinds.modules import FIRST_ROOT, ModuleRecord, ModuleRole

# FSDP2 makes a class of its own, named after the module's.
_PREFIXES = ("FSDP", "Replicate")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Layers without a common root are roots of their own. More of them would show nothing further.
MOST_ROOTS = 8


class RootMesh(NamedTuple):
    """The ranks that shard a module together, replicas included, and their coordinates."""

    ranks: tuple[int, ...]
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coordinates: dict[str, list[int]]


@dataclass(eq=False)
class ShardedRoot(TrackedModule):
    """A module whose forward FSDP begins with. Its parameters are listed for their names and flags only."""

    def list_tensors(self) -> None:
        module = self.module()
        if module is None:
            return
        # FSDP1 takes parameters out of their modules and puts other ones there.
        of_device_mesh = self.mesh.get("kind") == DTENSOR
        parameters = named_slots(module, torch_compat.PARAMETERS) if of_device_mesh else ()
        self.parameters = list(parameters)
        buffers = named_slots(module, torch_compat.BUFFERS)
        # One that a device mesh distributes is another part on each rank.
        self.buffers = [slot for slot in buffers if type(slot.holder[slot.key]) in _PLAIN]
        self._contents = ModuleContents()
        self.revision += 1

    def refresh(self) -> list[ParamSetChange] | None:
        """FSDP exchanges the parameters at every forward."""
        return None

    def parameter_tensors(self) -> list[torch.Tensor]:
        return [slot.holder[slot.key] for slot in self.parameters]

    def record(self) -> ModuleRecord:
        parameters, self.parameters = self.parameters, []
        try:
            return super().record()
        finally:
            self.parameters = parameters


class RootTracker:
    """Finds the roots by their forwards."""

    def __init__(self, context: RankContext, new_index: Callable[[], int]) -> None:
        self._context = context
        self._new_index = new_index
        self._ordinals = Ordinals()
        # How many were found. Their parameters are compared only once an optimizer steps them.
        self.made = 0
        # By id of the module; None: not tracked.
        self._roots: dict[int, ShardedRoot | None] = {}
        # Roots with a forward that no backward has followed yet.
        self._awaiting: list[ShardedRoot] = []
        self._on_released = GUARD.protect("agent", "forgotten", self._release, while_capturing=True)

    def of_forward(self, state: Any, module: torch.nn.Module) -> tuple[ShardedRoot | None, bool]:
        """The root whose forward begins, and whether it is the first one; None inside the forward of another."""
        # Not known before the first forward, which is that of the root.
        if torch_compat.read(torch_compat.FSDP_IS_ROOT, state) is False:
            return None, False
        known = self._roots.get(id(module), self)
        if known is None or (isinstance(known, ShardedRoot) and known.ddp() is module):
            return known, False
        if len(self._roots) >= MOST_ROOTS and id(module) not in self._roots:
            return None, False
        tracked = self._roots[id(module)] = self._track(module)
        if tracked is not None:
            weakref.finalize(module, self._on_released, id(module), tracked).atexit = False
        return tracked, tracked is not None

    def _track(self, module: torch.nn.Module) -> ShardedRoot | None:
        inner = torch_compat.read(torch_compat.WRAPPED_BY_FSDP, module)
        mesh = _mesh_of_fsdp1(module) if inner is not None else _mesh_of_fsdp2(module)
        if mesh is None or len(mesh.ranks) < 2:
            return None
        name = type(module if inner is None else inner).__name__
        if inner is None:
            name = (
                next((name.removeprefix(each) for each in _PREFIXES if name.startswith(each)), name) or name
            )
        self.made += 1
        return ShardedRoot(
            index=self._new_index(),
            ordinal=self._ordinals.of(ModuleRole.ROOT, name, (), FIRST_ROOT),
            group=mesh.ranks,
            module=weakref.ref(module if inner is None else inner),
            ddp=weakref.ref(module),
            ignored=frozenset(),
            name=name,
            where=user_callsite(),
            role=ModuleRole.ROOT,
            compared_live=False,
            mesh={
                "kind": DTENSOR if inner is None else "fsdp",
                "dims": list(mesh.dims),
                "shape": list(mesh.shape),
                "coordinates": mesh.coordinates,
            },
        )

    def forward_begun(self, tracked: ShardedRoot) -> None:
        tracked.forwards += 1
        if tracked not in self._awaiting:
            self._awaiting.append(tracked)

    def backward_called(self) -> None:
        awaiting, self._awaiting = self._awaiting, []
        for tracked in awaiting:
            self._context.emit(Probe.root_backward, tracked)

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> list[TrackedModule]:
        """The roots of which the optimizer steps parameters."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        roots = [root for root in self._roots.values() if root is not None]
        stepped_roots: list[TrackedModule] = [
            root for root in roots if (module := root.ddp()) is not None and _holds(module, stepped)
        ]
        # FSDP may keep the whole parameters in their modules.
        return stepped_roots or (list(roots) if len(roots) == 1 else [])

    def _release(self, identity: int, tracked: ShardedRoot) -> None:
        if self._roots.get(identity) is tracked:
            del self._roots[identity]
        if tracked in self._awaiting:
            self._awaiting.remove(tracked)
        self._context.emit(Probe.wrapper_released, tracked)
        tracked.forget()


def _holds(module: torch.nn.Module, wanted: set[int]) -> bool:
    return any(id(parameter) in wanted for parameter in module.parameters())


def _mesh_of_fsdp2(module: torch.nn.Module) -> RootMesh | None:
    for group in fsdp2_groups(module.modules()):
        mesh = group.mesh_info.mesh
        names = mesh.mesh_dim_names or tuple(f"dim{number}" for number in range(mesh.ndim))
        return _root_mesh(mesh.mesh, tuple(names))
    return None


def fsdp2_groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """The groups of parameters that FSDP2 shards together."""
    for module in modules:
        state_of = torch_compat.read(torch_compat.FSDP_STATE, module)
        state = state_of() if state_of is not None else None
        yield from torch_compat.read(torch_compat.FSDP_GROUPS, state, ())


def _mesh_of_fsdp1(module: Any) -> RootMesh | None:
    distributed: Any = torch.distributed
    shards = distributed.get_process_group_ranks(module.process_group)
    replicas = torch_compat.read(torch_compat.FSDP_REPLICAS, module)
    if replicas is None:
        return _root_mesh(torch.tensor(shards), ("shards",))
    mesh = torch_compat.read(torch_compat.FSDP_MESH, module)
    if mesh is not None and mesh.ndim > 1:
        return _root_mesh(mesh.mesh, tuple(mesh.mesh_dim_names or ("replicas", "shards")))
    count, size = len(distributed.get_process_group_ranks(replicas)), len(shards)
    if count * size != distributed.get_world_size():
        return None
    return _root_mesh(torch.arange(count * size).view(count, size), ("replicas", "shards"))


def _root_mesh(ranks: torch.Tensor, dims: tuple[str, ...]) -> RootMesh:
    rows = {
        str(rank): [int(part) for part in torch.unravel_index(torch.tensor(number), ranks.shape)]
        for number, rank in enumerate(ranks.flatten().tolist())
    }
    return RootMesh(
        tuple(sorted(ranks.flatten().tolist())), dims, tuple(ranks.shape), rows if len(rows) <= 1024 else {}
    )
