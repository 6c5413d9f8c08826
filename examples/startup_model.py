"""Shared by the start-up examples: a model of 200 MB, its checkpoint, and a few training steps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = int(os.environ.get("STARTUP_WIDTH", "2500"))
LAYERS = 8


def build_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def checkpoint() -> Path:
    """Path of a pretrained model. On first use, rank 0 creates it in the temporary folder."""
    path = Path(tempfile.gettempdir()) / f"ddpcheck-example-{WIDTH}.pt"
    if dist.get_rank() == 0 and not path.exists():
        torch.manual_seed(0)
        unfinished = path.with_suffix(".unfinished")
        torch.save(build_model().state_dict(), unfinished)
        unfinished.rename(path)
    dist.barrier()
    return path


def train(model: nn.Module, steps: int = 3) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
