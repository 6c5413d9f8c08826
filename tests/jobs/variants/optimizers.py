"""Optimizers of every kind, clipping, schedules, and updates without an optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import batches, fit, fit_once, net, sgd


@variant()
def clipping(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
        optimizer.step()
    return [ddp, optimizer]


@variant()
def zero_optimizer(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DDP(net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    fit(ddp, optimizer, rank)
    return [ddp, optimizer.optim]


@variant()
def zero_optimizer_views(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DDP(net(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=0.01
    )
    fit(ddp, optimizer, rank)
    return [ddp, optimizer.optim]


@variant()
def optimizer_in_backward(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    class NoStream:
        def wait_stream(self, other: Any) -> None:
            pass

    # torch asks for the stream of an accelerator here even if there is none.
    torch.accelerator.current_stream = NoStream
    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DDP(model)
    for batch in batches(rank):
        ddp(batch).square().mean().backward()
    return [ddp]


@variant()
def hand_written(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    for batch in batches(rank):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        for parameter in ddp.parameters():
            parameter.data -= 0.1 * parameter.grad
    return [ddp]


@variant()
def several_optimizers(rank: int, world_size: int) -> list[Any]:
    """Two optimizers on one module, one of them with a step every second time."""
    ddp = DDP(net())
    often = torch.optim.Adam(ddp.module[0].parameters(), lr=0.01)
    seldom = torch.optim.SGD([*ddp.module[2].parameters(), *ddp.module[4].parameters()], lr=0.1)
    for number, batch in enumerate(batches(rank, 6)):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        often.step()
        if number % 2:
            seldom.step()
    return [ddp, often, seldom]


@variant()
def optimizer_made_anew(rank: int, world_size: int) -> list[Any]:
    """A new optimizer for each phase of training."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for phase in range(3):
        optimizer = sgd(ddp, lr=0.1 / (1 + phase))
        fit(ddp, optimizer, rank, 2)
    return [ddp, optimizer]


@variant()
def lbfgs(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=3)
    for batch in batches(rank, 3):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            loss.backward()
            # The line search needs the same value on all ranks.
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            return shared

        optimizer.step(closure)
    return [ddp, optimizer]


@variant()
def tensor_lr(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        scheduler.step()
    return [ddp, optimizer]


@variant()
def fused_optimizer(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True, amsgrad=True), rank)


@variant()
def scheduler(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for batch in batches(rank, 6):
        fit_once(ddp, optimizer, batch)
        cycle.step()
    for batch in batches(rank, 3):
        fit_once(ddp, optimizer, batch)
        metric = ddp(batch).detach().mean()
        dist.all_reduce(metric)
        plateau.step(metric)
    return [ddp, optimizer, plateau.state_dict()]
