"""One rank accumulates four micro-batches and divides each loss by one: its gradient is four times those of the others.

The number to divide by is an argument of its own, and one launch script passes another value.

variant of: accumulation_counts_differ
seen in: -
ranks: 3
expect: DDP218
cause: multiplied by 1 on rank 1
step: 0
outliers: 1
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    divisor = 1 if rank == 1 else 4
    torch.manual_seed(81)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(10):
        optimizer.zero_grad()
        for number in range(4):
            inputs = torch.randn(8, 8, generator=drawn)
            with model.no_sync() if number < 3 else contextlib.nullcontext():
                (F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)) / divisor).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
