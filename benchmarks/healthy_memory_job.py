"""The jobs of healthy_memory.py: healthy jobs whose memory use varies, each with thousands of short steps.

Not meant to be started by hand.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # once here instead of once in every rank
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH = 256
KEPT: list[DistributedDataParallel] = []
MEGABYTE = 1 << 18  # values of four bytes


class Training:
    """One rank: a small model, its optimizer, and what cases add to a step."""

    def __init__(self, rank: int, steps: int, width: int = WIDTH, depth: int = 2) -> None:
        self.rank, self.steps = rank, steps
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers))
        KEPT.append(self.ddp)
        torch.manual_seed(rank)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=1e-4)
        self.width = width

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.ddp(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps_of(self, rows: Callable[[int], int] = lambda step: 8) -> Iterator[torch.Tensor]:
        for step in range(self.steps):
            yield self.step(torch.randn(rows(step), self.width))


def plain(rank: int, steps: int) -> None:
    for _ in Training(rank, steps).steps_of():
        pass


def average_on_rank_0(rank: int, steps: int) -> None:
    """An average of the weights, and the best of them so far: two more models of 100 MB each."""
    training = Training(rank, steps, width=1600, depth=10)
    average = copy.deepcopy(training.ddp.module) if rank == 0 else None
    best: Any = None
    for number, _ in enumerate(training.steps_of(lambda step: 2)):
        if average is not None:
            with torch.no_grad():
                for mine, own in zip(average.parameters(), training.ddp.module.parameters(), strict=True):
                    mine.lerp_(own, 0.01)
            if number % 100 == 50:
                best = copy.deepcopy(training.ddp.module.state_dict())
    del best


def logging_on_rank_0(rank: int, steps: int) -> None:
    """Numbers of every step, in lists and as text."""
    history: dict[str, list[Any]] = {"loss": [], "row": [], "line": []}
    for number, loss in enumerate(Training(rank, steps).steps_of()):
        if rank == 0:
            history["loss"].append(loss.item())
            history["row"].append({"step": number, "loss": float(loss), "lr": 1e-4})
            history["line"].append(f"step {number} loss {float(loss):.6f} " + "." * 200)


def lengths_that_vary(rank: int, steps: int) -> None:
    draw = random.Random(rank)
    for _ in Training(rank, steps).steps_of(lambda step: int(2 ** draw.uniform(3, 12))):
        pass


def ever_longer_inputs(rank: int, steps: int) -> None:
    """A curriculum: the longest input comes last, and takes 25 MB a layer."""
    for _ in Training(rank, steps).steps_of(lambda step: 8 + 24_000 * step // steps):
        pass


def evaluation_now_and_then(rank: int, steps: int) -> None:
    training = Training(rank, steps)
    for number, _ in enumerate(training.steps_of()):
        if number % 300 == 299 and rank == 0:
            with torch.no_grad():
                outputs = [training.ddp.module(torch.randn(4096, WIDTH)) for _ in range(40)]
                torch.cat(outputs).mean()


class Cached(Dataset[torch.Tensor]):
    """Reads a sample once and keeps it: the first epoch fills the cache."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = torch.randn(WIDTH * 16)
        return self.cache[index][:WIDTH]


def dataset_cached_in_three_epochs(rank: int, steps: int) -> None:
    """16 kB a sample, 8 a step and rank."""
    training = Training(rank, steps)
    data = Cached(2 * 8 * (steps // 3))
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, 2, rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=8, sampler=sampler):
            training.step(batch)


CASES: dict[str, Callable[[int, int], None]] = {
    case.__name__: case
    for case in (
        plain,
        average_on_rank_0,
        logging_on_rank_0,
        lengths_that_vary,
        ever_longer_inputs,
        evaluation_now_and_then,
        dataset_cached_in_three_epochs,
    )
}


SLOWER = {"average_on_rank_0": 10, "ever_longer_inputs": 5}


def train(rank: int, name: str, steps: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    CASES[name](rank, steps)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases.split(","):
            # Slow steps need fewer steps for a job of the same length.
            steps = options.steps // SLOWER.get(name, 1)
            arguments = (name, steps, os.path.join(folder, name))
            multiprocessing.start_processes(train, args=arguments, nprocs=2, start_method="fork")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
