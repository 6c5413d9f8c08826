"""Several models in one process: trained in turns, or one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, batches, fit, sgd


@variant()
def gan(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(7)
    generator = DDP(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, WIDTH)))
    critic = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)), broadcast_buffers=False)
    makes = torch.optim.Adam(generator.parameters(), lr=0.01)
    judges = torch.optim.Adam(critic.parameters(), lr=0.02)
    noise = batches(rank + 50, shape=(6, 3))
    for batch, drawn in zip(batches(rank), noise, strict=True):
        judges.zero_grad()
        (critic(generator(drawn).detach()).mean() - critic.module(batch).mean() * 0).backward()
        judges.step()
        makes.zero_grad()
        critic.requires_grad_(False)
        (-critic.module(generator(drawn)).mean()).backward()
        critic.requires_grad_(True)
        makes.step()
    return [generator, critic, makes, judges]


@variant()
def module_let_go(rank: int, world_size: int) -> list[Any]:
    """Several models one after the other in one process, as in a hyperparameter search."""
    losses = []
    for width in (4, 6):
        torch.manual_seed(width)
        ddp = DDP(nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, 2)))
        optimizer = sgd(ddp)
        fit(ddp, optimizer, rank, 2)
        losses.append([p.detach().clone() for p in ddp.parameters()])
        del ddp, optimizer
    return losses
