"""Parameters that FSDP distributes, with replicas on other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .registry import variant
from .small_jobs import WIDTH, batches


def _net() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))


def _fit(model: Any, rank: int, accumulate: bool = False) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in batches(rank):
        optimizer.zero_grad()
        for last in (False, True) if accumulate else (True,):
            if accumulate:
                model.set_requires_gradient_sync(last)
            model(batch).square().mean().backward()
        optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [_local(tensor) for tensor in [*model.parameters(), *state]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


@variant()
def hybrid_sharded(rank: int, world_size: int) -> list[Any]:
    """FSDP2 on a mesh of replicas and shards, with gradient accumulation."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shards = 2 if world_size == 4 else 1
    mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("replicas", "shards"))
    return _fit(fully_shard(_net(), mesh=mesh), rank, accumulate=True)


class _Noisy(nn.Module):
    """Draws random numbers, and has statistics and a table that FSDP does not synchronise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.rises = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drops = nn.Dropout(0.2)
        self.falls = nn.Linear(8, 4)
        self.register_buffer("table", torch.arange(8.0).sin())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.rises(inputs)) + self.table
        outputs: torch.Tensor = self.falls(self.drops(hidden.tanh()).to(self.falls.weight.dtype))
        return outputs


def _fit_noisy(model: Any, rank: int, buffers: list[torch.Tensor]) -> list[Any]:
    torch.manual_seed(400 + rank)
    trained = _fit(model, rank)
    return [*trained, *buffers, torch.get_rng_state()]


@variant()
def hybrid_sharded_noise(rank: int, world_size: int) -> list[Any]:
    """FSDP2 in layers, with reductions in another dtype: forwards with random numbers and buffers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shards = 2 if world_size == 4 else 1
    mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("replicas", "shards"))
    net: Any = _Noisy()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for layer in (net.rises, net.falls):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return _fit_noisy(fully_shard(net, mesh=mesh, mp_policy=policy), rank, list(net.buffers()))


@variant()
def hybrid_by_fsdp1(rank: int, world_size: int) -> list[Any]:
    """FSDP1 on a mesh of replicas and shards. With fewer than four ranks it divides nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    net: Any = _Noisy()
    buffers = list(net.buffers())
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    net.rises = FullyShardedDataParallel(net.rises, device_id=torch.device("cpu"), **options)
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)
    for batch in batches(rank, 2):
        # Kept for the first backward that is reduced.
        with model.no_sync():
            model(batch).square().mean().backward()
    return _fit_noisy(model, rank, buffers)


@variant()
def replicated_by_replicate(rank: int, world_size: int) -> list[Any]:
    """`replicate`, which is FSDP2 without shards where torch has it so, and DDP in earlier versions."""
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:
        from torch.distributed._composable.replicate import replicate

        return _fit(replicate(_net()), rank)
    from torch.distributed.device_mesh import init_device_mesh

    return _fit(replicate(_net(), mesh=init_device_mesh("cpu", (world_size,))), rank)


@variant()
def replicated_by_fsdp(rank: int, world_size: int) -> list[Any]:
    """FSDP1 that shards nothing, and keeps the original parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        _net(),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    assert dist.get_world_size() == world_size
    return _fit(model, rank)
