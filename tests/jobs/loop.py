"""The training loop of several job scripts in this folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def batches(count: int = STEPS) -> list[torch.Tensor]:
    """A different batch for each rank and step."""
    torch.manual_seed(100 + dist.get_rank())
    return [torch.randn(4, 8) for _ in range(count)]


def train(data: Iterable[torch.Tensor], before_step: Callable[[int], None] = lambda step: None) -> None:
    """Train a small model in the existing process group, one step per batch; rank 0 prints the losses."""
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(data):
        before_step(step)
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: {loss.item():.6f}", flush=True)
    # torch keeps DDP in a reference cycle. If it outlives the process group, gloo may abort at exit.
    del ddp, optimizer, loss
    gc.collect()
