"""A script that asks a variable of another scheduler for its ranks, finds none and trains alone, in good faith.

variant of: -
seen in: -
ranks: 2
launcher: torchrun
expect: DDP601
cause: does not train with DDP
step: none
outliers: none
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    ranks = int(os.environ.get("SLURM_NTASKS", "1"))
    torch.manual_seed(68)
    model = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), nn.Linear(5, 1))
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
