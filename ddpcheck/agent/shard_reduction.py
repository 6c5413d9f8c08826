"""Reads what FSDP is about to reduce: the whole gradients of this rank, and where each shard of the result belongs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ddpcheck import torch_compat

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# FSDP's own communication. A name of another class is the job's.
_OF_TORCH = "torch.distributed.fsdp."


@dataclass(frozen=True, eq=False)
class ReducedParameter:
    """A parameter of one reduction. Holds tensors of the job: keep it no longer than the backward."""

    name: str
    # Dtypes that the gradient passes through.
    dtypes: tuple[str, ...]
    # How many shards the gradient is divided into, and the one of this rank; along `dim`.
    shards: int
    position: int
    dim: int
    gradient: torch.Tensor
    sharded: Any

    def parts(self) -> Iterator[torch.Tensor]:
        """The gradient of this rank, as FSDP divides it among the ranks."""
        return iter(self.gradient.chunk(self.shards, self.dim) if self.shards > 1 else (self.gradient,))

    def shard_gradient(self) -> torch.Tensor | None:
        """This rank's shard of the reduced gradient, as far as there is one now."""
        local = torch_compat.read(torch_compat.LOCAL_TENSOR, self.sharded.grad)
        return local if type(local) in _PLAIN else None


@dataclass(frozen=True, eq=False)
class FlatReducedParameter(ReducedParameter):
    """All parameters that FSDP1 keeps in one flat tensor, which is `sharded`."""

    def shard_gradient(self) -> torch.Tensor | None:
        """Of a tensor that is not divided, the gradient from before is part of what is reduced."""
        if torch_compat.in_backward():
            kept = torch_compat.read(torch_compat.FLAT_SAVED_SHARD, self.sharded)
            return kept if self.shards > 1 and type(kept) in _PLAIN else None
        gradient = self.sharded.grad
        return gradient if type(gradient) in _PLAIN else None


@dataclass(frozen=True, eq=False)
class ShardReduction:
    """Gradients that FSDP reduces together."""

    parameters: list[ReducedParameter]
    # All ranks that contribute.
    ranks: tuple[int, ...]
    # The sum over these ranks is divided by it.
    divisor: float
    # The job's own implementation of the reduction; empty: that of torch.
    custom: str
    # False: the result is kept for the next backward, as with set_requires_all_reduce(False).
    complete: bool


class ShardReductionReader:
    """Reads the arguments of the function in which FSDP2 reduces gradients, by name: their order varies with torch."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._signature = inspect.signature(original)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardReduction | None:
        """None if nothing is known of the result, as with a hook of the job, or if one rank reduces alone."""
        given = self._signature.bind(*args, **kwargs).arguments
        if given.get("all_reduce_hook") is not None:
            return None
        scatters, reduces = given.get("reduce_scatter_group"), given.get("all_reduce_group")
        shards, replicas = _size(scatters), _size(reduces)
        if shards * replicas == 1:
            return None
        position = torch.distributed.get_rank(scatters) if shards > 1 else 0
        dtypes = tuple(
            str(given[name]).removeprefix("torch.")
            for name in ("reduce_dtype", "orig_dtype")
            if given.get(name) is not None
        )
        parameters: list[ReducedParameter] = []
        ranks: tuple[int, ...] = ()
        for number, (one, gradient) in enumerate(
            zip(given["fsdp_params"], given["unsharded_grads"], strict=True)
        ):
            if type(gradient) not in _PLAIN or _has_hooks(one.sharded_param):
                continue
            ranks = ranks or tuple(sorted(one.mesh_info.mesh.mesh.flatten().tolist()))
            name = torch_compat.read(torch_compat.FSDP_PARAMETER_NAME, one) or f"{number}"
            own = (str(gradient.dtype).removeprefix("torch."), *dtypes)
            parameters.append(
                ReducedParameter(
                    name, own, shards, position, one.fsdp_placement.dim, gradient, one.sharded_param
                )
            )
        if len(ranks) != shards * replicas:
            # A mesh of which only a part reduces gradients.
            return None
        factor = given.get("gradient_divide_factor")
        comm = type(given.get("reduce_scatter_comm"))
        return ShardReduction(
            parameters,
            ranks,
            float(len(ranks) if factor is None else factor),
            "" if comm.__module__.startswith(_OF_TORCH) else comm.__qualname__,
            reduces is None or bool(given.get("all_reduce_grads", True)),
        )


def read_flat_reduction(given: tuple[Any, Any]) -> ShardReduction | None:
    """What FSDP1 reduces now. None if it moves gradients to the host, or if one rank reduces alone."""
    distributed: Any = torch.distributed
    state, handle = given
    flat = handle.flat_param
    gradient = flat.grad
    if type(gradient) not in _PLAIN or handle.flat_param.device != gradient.device:
        return None
    if torch_compat.read(torch_compat.FLAT_CPU_GRADIENT, flat) is not None or _has_hooks(flat):
        return None
    ranks = tuple(distributed.get_process_group_ranks(state.process_group))
    between = torch_compat.read(torch_compat.FSDP_REPLICAS, state)
    replicas = () if between is None else tuple(distributed.get_process_group_ranks(between))
    is_divided = state.sharding_strategy.name != "NO_SHARD"
    everyone = _ranks_of_mesh(state, ranks, replicas)
    if len(everyone) < 2:
        return None
    names = torch_compat.read(torch_compat.FLAT_NAMES, flat) or ("flat parameter",)
    dtypes = (str(gradient.dtype).removeprefix("torch."), str(flat.dtype).removeprefix("torch."))
    parameter = FlatReducedParameter(
        names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
        dtypes,
        len(ranks) if is_divided else 1,
        distributed.get_rank(state.process_group) if is_divided else 0,
        0,
        gradient,
        flat,
    )
    hook = torch_compat.read(torch_compat.FSDP_COMM_HOOK, state)
    custom = "" if hook is None else getattr(hook, "__qualname__", type(hook).__name__)
    return ShardReduction([parameter], everyone, float(len(everyone)), custom, True)


def _ranks_of_mesh(state: Any, ranks: tuple[int, ...], replicas: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks that contribute; empty: not known."""
    if len(replicas) < 2:
        return tuple(sorted(ranks))
    mesh = torch_compat.read(torch_compat.FSDP_MESH, state)
    if mesh is not None and mesh.ndim > 1:
        return tuple(sorted(mesh.mesh.flatten().tolist()))
    world = int(torch.distributed.get_world_size())
    return tuple(range(world)) if len(ranks) * len(replicas) == world else ()


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Hooks of the job run as soon as the shard is there: they may change it, or step with it."""
    return bool(torch_compat.read(torch_compat.POST_ACCUMULATE_HOOKS, parameter))
