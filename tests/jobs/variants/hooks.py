"""Communication hooks, torch's own and custom ones, in place of DDP's reduction or broadcast."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, batches, fit, fit_once, net, sgd


@variant()
def buffers_by_hook(rank: int, world_size: int) -> list[Any]:
    """A custom hook synchronises the buffers and completes only during the backward."""

    def add_up(state: Any, buffers: dict[str, torch.Tensor]) -> list[Any]:
        return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in buffers.values()]

    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))
    after_forward = nn.parallel.distributed._BufferCommHookLocation.POST_FORWARD
    ddp._register_buffer_comm_hook(None, add_up, after_forward)
    return fit(ddp, sgd(ddp), rank)


@variant()
def fp16_hook(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return fit(ddp, sgd(ddp), rank)


@variant()
def bf16_hook(rank: int, world_size: int) -> list[Any]:
    # Under another name: torch rejects the original without NCCL.
    def squeezed(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(state, bucket)

    ddp = DDP(net())
    ddp.register_comm_hook(None, squeezed)
    return fit(ddp, sgd(ddp), rank)


@variant()
def neutral_hook(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return fit(ddp, sgd(ddp), rank)


@variant()
def power_sgd(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return fit(ddp, sgd(ddp), rank, 6)


@variant(least=2)
def post_local_sgd(rank: int, world_size: int) -> list[Any]:
    """Parameters differ between two averagings on purpose."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = DDP(net())
    alone, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(optim=torch.optim.SGD(ddp.parameters(), lr=0.1), averager=averager)
    for batch in batches(rank, 8):
        fit_once(ddp, optimizer, batch)
    return [ddp, optimizer.optim]
