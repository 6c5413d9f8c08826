"""A small job of two ranks for `benchmarks/soak.py`: many steps, and a divergence near the end."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS)
    )
    dist.init_process_group("gloo", f"file://{options.store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=draw)).square().mean().backward()
        if step == options.diverge_at and rank == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 2
        optimizer.step()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--diverge-at", type=int, default=-1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.store = Path(folder) / "store"
        multiprocessing.start_processes(train, args=(options,), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
