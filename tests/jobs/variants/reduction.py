"""When and which gradients are reduced: accumulation, unused parameters, buckets, ranks that end early."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, batches, fit, net, sgd


@variant()
def plain(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01), rank)


@variant()
def accumulation(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank, 6)):
        if number % 3 < 2:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
            continue
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [ddp, optimizer]


@variant()
def accumulation_uneven(rank: int, world_size: int) -> list[Any]:
    """Ranks take different numbers of micro-batches, with BatchNorm, as with packed sequences."""
    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))
    optimizer = sgd(ddp)
    for step in range(12):
        micro = list(batches(rank + 10 * step, 1 + (rank + step) % 3))
        with ddp.no_sync():
            for batch in micro[:-1]:
                ddp(batch).square().mean().backward()
        ddp(micro[-1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [ddp, optimizer]


class Branches(nn.Module):
    """Uses one of two branches; the parameters of the other are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)])
        self.out = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor, way: int) -> torch.Tensor:
        return self.out(self.ways[way](batch))


@variant()
def find_unused(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(1)
    ddp = DDP(Branches(), find_unused_parameters=True)
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        # The same branch on all ranks, then a different one on each.
        ddp(batch, 0 if number < 2 else (rank + number) % 2).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def find_unused_accumulated(rank: int, world_size: int) -> list[Any]:
    """The last micro-batch does not use a branch of the first one: DDP reduces the gradients that are left."""
    torch.manual_seed(1)
    ddp = DDP(Branches(), find_unused_parameters=True)
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(batch, 0).square().mean().backward()
        ddp(batch + 1, (rank + number) % 2 if number > 1 else 1).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def gradients_never_cleared(rank: int, world_size: int) -> list[Any]:
    """A running sum of gradients; some backwards do not use a layer on some or all ranks."""
    torch.manual_seed(1)
    ddp = DDP(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = sgd(ddp, lr=0.001)
    for number, batch in enumerate(batches(rank, 8)):
        ddp(batch, number % 2 if number < 4 else (rank + number) % 2).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def static_graph(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), static_graph=True)
    return fit(ddp, sgd(ddp), rank)


@variant()
def bucket_view(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), gradient_as_bucket_view=True)
    return fit(ddp, sgd(ddp), rank)


@variant()
def small_buckets(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), bucket_cap_mb=0.0001)
    return fit(ddp, sgd(ddp), rank)


@variant()
def join_uneven(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    with ddp.join():
        fit(ddp, optimizer, rank, 3 + rank)
    return [ddp]


@variant()
def join_live_ranks(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))
    optimizer = sgd(ddp)
    with ddp.join(divide_by_initial_world_size=False):
        fit(ddp, optimizer, rank, 2 + (world_size - rank))
    return [ddp]
