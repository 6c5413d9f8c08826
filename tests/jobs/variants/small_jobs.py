"""Parts of the jobs: a process group, small models, batches and loops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 4
WIDTH = 8

_STORES = iter(range(1_000_000))


def make_group(rank: int, world_size: int) -> None:
    """Each call uses a new store file, named after JOB_STORE; all ranks must call it equally often."""
    path = f"{os.environ['JOB_STORE']}-{next(_STORES)}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)


def net(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


def batches(rank: int, steps: int = STEPS, shape: tuple[int, ...] = (6, WIDTH)) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(*shape, generator=generator)


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


def fit(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> list[Any]:
    for batch in batches(rank, steps):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


def fit_once(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    ddp(batch).square().mean().backward()
    optimizer.step()
