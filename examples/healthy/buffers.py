"""Modules with state beside their parameters.

SyncBatchNorm is not among them: torch refuses to run it on CPU.

ranks: 2 3
expect: nothing
cases: batch_norm statistics_stay_local counters cache_that_grows codebook frozen_statistics spectral_norm
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Counting(nn.Linear):
    """Keeps count of the batches and of the largest input seen."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("largest", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        self.largest = torch.maximum(self.largest, inputs.detach().abs().amax(0))
        return super().forward(inputs)


class Positions(nn.Linear):
    """A table of angles that is made anew whenever a longer batch comes along, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("angles", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(self.angles) < len(inputs):
            self.register_buffer("angles", torch.arange(float(len(inputs))) / 10, persistent=False)
        return super().forward(inputs) * self.angles[: len(inputs), None].cos()


class Codebook(nn.Linear):
    """A running mean that all ranks keep alike, because they reduce what goes into it."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        seen = outputs.detach().mean(0)
        dist.all_reduce(seen)
        self.centre.lerp_(seen / dist.get_world_size(), 0.1)
        return outputs - self.centre


def build(case: str) -> nn.Module:
    middle = {
        "counters": Counting,
        "cache_that_grows": Positions,
        "codebook": Codebook,
        "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    }.get(case, lambda: nn.BatchNorm1d(6))
    return nn.Sequential(nn.Linear(10, 6), middle(), nn.Softplus(), nn.Linear(6, 2))


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    network = build(case)
    model = DistributedDataParallel(network, broadcast_buffers=case != "statistics_stay_local")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(9 + dist.get_rank())
    for step in range(6):
        if case == "frozen_statistics" and step == 3:
            network[1].eval()
        rows = 4 + step if case == "cache_that_grows" else 8
        optimizer.zero_grad()
        model(torch.randn(rows, 10, generator=drawn)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
