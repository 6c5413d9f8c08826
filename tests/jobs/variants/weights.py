"""Copies of the weights and writes to them: averages, clamping, checkpoints."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, batches, fit, fit_once, net, normed, sgd


@variant()
def ema_aside(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    averaged = torch.optim.swa_utils.AveragedModel(
        ddp.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for batch in batches(rank):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(ddp.module)
    return [ddp, optimizer, averaged]


@variant()
def ema_swapped(rank: int, world_size: int) -> list[Any]:
    """Averaged weights are used for evaluation, then the trained ones are restored."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    shadow = [p.detach().clone() for p in ddp.parameters()]
    losses = []
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        kept = [p.detach().clone() for p in ddp.parameters()]
        for average, parameter in zip(shadow, ddp.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
            parameter.data.copy_(average)
        with torch.no_grad():
            losses.append(ddp(batch).mean())
        for parameter, old in zip(ddp.parameters(), kept, strict=True):
            parameter.data.copy_(old)
    return [ddp, optimizer, shadow, losses]


@variant()
def ema_swapped_on_rank_0(rank: int, world_size: int) -> list[Any]:
    """Only rank 0 evaluates with averaged weights, and restores the trained ones before the next forward."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    shadow = copy.deepcopy(ddp.module)
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        if rank == 0:
            kept = copy.deepcopy(ddp.module.state_dict())
            ddp.module.load_state_dict(shadow.state_dict())
            with torch.no_grad():
                ddp.module(batch)
            ddp.module.load_state_dict(kept)
    return [ddp, optimizer]


@variant()
def weights_clamped(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = torch.optim.RMSprop(ddp.parameters(), lr=0.01)
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        for parameter in ddp.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    return [ddp, optimizer]


def saved_by_rank_0(rank: int, state: Any) -> Any:
    """Rank 0 saves `state`, and all ranks load it."""
    path = Path(tempfile.gettempdir()) / f"{os.path.basename(os.environ['JOB_STORE'])}.pt"
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    loaded = torch.load(path, weights_only=True)
    dist.barrier()
    if rank == 0:
        path.unlink()
    return loaded


@variant()
def checkpoint_before(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(rank)
    model = nn.Linear(WIDTH, 4)
    model.load_state_dict(saved_by_rank_0(rank, model.state_dict()))
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


@variant()
def checkpoint_after(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    optimizer = sgd(ddp)
    fit(ddp, optimizer, rank, 2)
    state = saved_by_rank_0(rank, {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()})
    fit(ddp, optimizer, rank, 2)
    ddp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return fit(ddp, optimizer, rank)
