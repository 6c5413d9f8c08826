"""Buffers: statistics of BatchNorm, a cache that grows, a codebook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import STEPS, WIDTH, batches, fit, normed, sgd


@variant()
def batch_norm(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    return fit(ddp, sgd(ddp), rank)


@variant()
def batch_norm_unsynced(rank: int, world_size: int) -> list[Any]:
    """Statistics stay local on purpose."""
    ddp = DDP(normed(), broadcast_buffers=False)
    return fit(ddp, sgd(ddp), rank)


@variant()
def buffer_made_late(rank: int, world_size: int) -> list[Any]:
    """A cache that grows with the longest sequence, as in rotary embeddings."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "table") or len(self.table) < len(batch):
                self.register_buffer("table", torch.arange(float(len(batch))), persistent=False)
            return self.linear(batch) * self.table[: len(batch), None].cos()

    torch.manual_seed(2)
    ddp = DDP(Cached())
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        ddp(batch[: 2 + number]).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def codebook(rank: int, world_size: int) -> list[Any]:
    """A buffer that forward updates from reduced statistics."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4)
            self.register_buffer("codes", torch.randn(4))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            out = self.linear(batch)
            if self.training:
                seen = out.detach().mean(0)
                dist.all_reduce(seen)
                self.codes.mul_(0.9).add_(seen / dist.get_world_size(), alpha=0.1)
            return out - self.codes

    torch.manual_seed(16)
    ddp = DDP(Quantised())
    return fit(ddp, sgd(ddp), rank)
