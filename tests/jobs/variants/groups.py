"""Process groups: of some ranks, destroyed and made again, and one without a DDP module."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, fit, make_group, net, sgd


@variant(least=2)
def subgroup(rank: int, world_size: int) -> list[Any]:
    """Only the first ranks train, in a subgroup."""
    members = list(range(max(1, world_size - 1)))
    group = dist.new_group(members)
    if rank not in members:
        return []
    ddp = DDP(net(), process_group=group)
    return fit(ddp, sgd(ddp), rank)


@variant(least=4)
def two_subgroups(rank: int, world_size: int) -> list[Any]:
    """Two subgroups train two independent models."""
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, world_size)))]
    torch.manual_seed(rank // 2)
    ddp = DDP(nn.Linear(WIDTH, 4), process_group=groups[rank >= 2])
    return fit(ddp, sgd(ddp), rank, 3 if rank < 2 else 5)


@variant()
def group_made_again(rank: int, world_size: int) -> list[Any]:
    first = DDP(net())
    optimizer = sgd(first)
    fit(first, optimizer, rank, 2)
    model = first.module
    del first
    dist.destroy_process_group()
    make_group(rank, world_size)
    again = DDP(model)
    return fit(again, optimizer, rank, 3)


@variant()
def no_module(rank: int, world_size: int) -> list[Any]:
    """A process group and collectives, but no DDP module."""
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return [total]
