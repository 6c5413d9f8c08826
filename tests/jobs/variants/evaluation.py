"""Evaluation: between epochs, on rank 0 alone, and without training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import batches, fit_once, normed, sgd


@variant()
def evaluation(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    optimizer = sgd(ddp)
    seen = []
    for epoch in range(3):
        ddp.train()
        for batch in batches(rank + 10 * epoch, 2):
            fit_once(ddp, optimizer, batch)
        ddp.eval()
        with torch.no_grad():
            seen += [ddp(batch).mean() for batch in batches(rank, 2)]
    return [ddp, optimizer, seen]


@variant()
def evaluation_on_rank_0(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    optimizer = sgd(ddp)
    for epoch in range(3):
        ddp.train()
        for batch in batches(rank + 10 * epoch, 2):
            fit_once(ddp, optimizer, batch)
        if rank == 0:
            ddp.eval()
            with torch.no_grad():
                for batch in batches(rank, 2):
                    ddp.module(batch)
        dist.barrier()
    return [ddp, optimizer]


@variant()
def no_training(rank: int, world_size: int) -> list[Any]:
    """Wrapped and only evaluated."""
    ddp = DDP(normed()).eval()
    with torch.no_grad():
        return [ddp, [ddp(batch) for batch in batches(rank)]]
