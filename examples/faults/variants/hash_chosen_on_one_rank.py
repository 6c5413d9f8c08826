"""One of two ranks has a variable in its environment that makes ddpcheck hash in another way there.

variant of: -
seen in: -
ranks: 2
expect: DDP604
cause: hash differs
step: none
outliers: 0 1
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def source_profile():
    """What the profile of one machine sets, and that of the other does not."""
    if os.environ["RANK"] == "1":
        os.environ["DDPCHECK_HASH"] = "multilinear"


def train():
    torch.manual_seed(69)
    model = DDP(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    source_profile()
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
