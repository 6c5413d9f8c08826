"""Lower and mixed precision: autocast, a gradient scaler, layers of several dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, batches, fit, net, sgd


@variant()
def bf16_autocast(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        loss.backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def grad_scaler(rank: int, world_size: int) -> list[Any]:
    """One overflow, which the reduction spreads to all ranks, so every rank skips that step."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        if number == 2 and rank == world_size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [ddp, optimizer, scaler.state_dict()]


@variant()
def mixed_dtypes(rank: int, world_size: int) -> list[Any]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Linear(WIDTH, 8)
            self.fine = nn.Linear(8, 8, dtype=torch.float64)
            self.coarse = nn.Linear(8, 4, dtype=torch.bfloat16)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.coarse(self.fine(self.single(batch).double()).bfloat16()).float()

    torch.manual_seed(8)
    ddp = DDP(Mixed())
    return fit(ddp, sgd(ddp), rank)
