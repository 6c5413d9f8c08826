"""Trains with data-loader workers of every start method."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from loop import train
from torch.utils.data import DataLoader, Dataset

METHODS = ("fork", "spawn", "forkserver")
BATCHES = 2


class Numbers(Dataset[torch.Tensor]):
    """Samples whose first value is the process id of their worker."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return BATCHES * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self._rank + index)
        return torch.cat([torch.tensor([float(os.getpid())]), torch.randn(8, generator=generator)])


def batches() -> Iterator[torch.Tensor]:
    data = Numbers(dist.get_rank())
    for method in METHODS:
        workers = set()
        for batch in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=method):
            workers.add(int(batch[0, 0]))
            yield batch[:, 1:]
        assert workers
        assert os.getpid() not in workers


def main() -> None:
    dist.init_process_group("gloo")
    train(batches())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
