"""One rank accumulates two micro-batches for a step, the others four: its configuration is older.

Each rank divides its loss by its own number, so the reductions match and nothing looks wrong; but a sample of that rank
counts twice.

bug: 45
seen in: -
ranks: 3
expect: DDP214
cause: different numbers of backwards
step: 0
outliers: 2
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts = 2 if rank == 2 else 4
    torch.manual_seed(6)
    model = DDP(nn.Sequential(nn.Linear(7, 14), nn.ELU(), nn.Linear(14, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(7):
        for part in range(parts):
            inputs = torch.randn(4, 7, generator=drawn)
            with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                ((model(inputs) - inputs.sum(1, keepdim=True)).square().mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
