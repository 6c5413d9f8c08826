"""A rank whose own loss is NaN skips the step; the others apply the NaN that it sent them.

The test comes after the backward and looks at this rank's loss only, so the rank that made the NaN is the one
that is saved from it.

bug: 22
seen in: Lightning#5243
ranks: 2
expect: DDP207
cause: a step was skipped on rank 1
stage: params
step: 2
outliers: 1
also: DDP209
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.LayerNorm(12), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        inputs = torch.randn(8, 6, generator=data)
        targets = torch.rand(8, 1, generator=data) - (2.0 if step == 2 and rank == 1 else 0.0)
        optimizer.zero_grad()
        loss = (model(inputs) - targets.log()).square().mean()  # the logarithm of a negative number
        loss.backward()
        if torch.isnan(loss):
            print(f"rank {rank}: skipping a bad batch")
            continue
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
