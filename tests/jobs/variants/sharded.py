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
