"""torch.compile: around the wrapper, inside it, and on the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import batches, fit, net, normed, sgd


@variant()
def compiled_outside(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(torch.compile(ddp, backend="eager"), sgd(ddp), rank)


@variant()
def compiled_inside(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(torch.compile(net(), backend="eager"))
    return fit(ddp, sgd(ddp), rank)


@variant()
def compiled_outside_aot(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(torch.compile(ddp, backend="aot_eager"), sgd(ddp), rank)


@variant()
def compiled_inside_aot(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(torch.compile(normed(), backend="aot_eager"))
    return fit(ddp, sgd(ddp), rank)


@variant()
def compiled_optimizer(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    step = torch.compile(optimizer.step, backend="eager")
    for batch in batches(rank):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        step()
    return [ddp, optimizer]
