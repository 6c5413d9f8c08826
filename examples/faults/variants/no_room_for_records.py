"""One of two ranks may write small files only: its records end in mid-run, its training does not.

variant of: -
seen in: -
ranks: 2
expect: DDP605
cause: could not continue to write its records
step: none
outliers: 1
"""

import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MOST_BYTES = 8 << 10


def train():
    torch.manual_seed(71)
    model = DDP(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, resource.RLIM_INFINITY))
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
