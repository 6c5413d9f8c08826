"""More than one forward and one backward per step: activation checkpointing, a gradient penalty."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from .registry import variant
from .small_jobs import batches, fit, net, sgd


@variant()
def activation_checkpointing(rank: int, world_size: int) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(), nn.Linear(4, 2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, batch, use_reentrant=False))

    torch.manual_seed(6)
    ddp = DDP(Checkpointed())
    return fit(ddp, sgd(ddp), rank)


@variant()
def activation_checkpointing_reentrant(rank: int, world_size: int) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(), nn.Linear(4, 2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, batch.requires_grad_(), use_reentrant=True))

    torch.manual_seed(6)
    ddp = DDP(Checkpointed(), static_graph=True)
    return fit(ddp, sgd(ddp), rank)


@variant()
def second_order(rank: int, world_size: int) -> list[Any]:
    """A gradient penalty with autograd.grad on the inputs."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        batch.requires_grad_()
        out = ddp.module(batch)
        (slope,) = torch.autograd.grad(out.sum(), batch)
        (ddp(batch).square().mean() + 0 * slope.norm().detach()).backward()
        optimizer.step()
    return [ddp, optimizer]
