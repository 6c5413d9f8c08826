"""Data and random numbers that every rank draws for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from .registry import variant
from .small_jobs import WIDTH, batches, fit, fit_once, net, sgd


@variant()
def seed_per_rank(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.3), nn.Linear(12, 4))
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


class Split(IterableDataset[torch.Tensor]):
    """Every rank takes its share of one stream."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, sample in enumerate(batches(0, 24, (WIDTH,))):
            if number % self.world_size == self.rank and number < 24 - 24 % self.world_size:
                yield sample


@variant()
def iterable(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in DataLoader(Split(rank, world_size), batch_size=2, drop_last=True):
        fit_once(ddp, optimizer, batch)
    return [ddp, optimizer]


@variant()
def loader_workers(rank: int, world_size: int) -> list[Any]:
    """Workers, shuffling and dropout draw random numbers, which ddpcheck must not change."""
    torch.manual_seed(11 + rank)
    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.5), nn.Linear(12, 4)))
    optimizer = sgd(ddp)
    data = TensorDataset(torch.randn(24 * world_size, WIDTH, generator=torch.Generator().manual_seed(4)))
    sampler: Any = DistributedSampler(data, world_size, rank, shuffle=True)
    loader = DataLoader(data, batch_size=6, sampler=sampler, num_workers=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            fit_once(ddp, optimizer, batch)
    return [ddp, optimizer, torch.get_rng_state(), torch.randn(3)]
