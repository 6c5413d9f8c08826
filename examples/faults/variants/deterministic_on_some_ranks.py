"""Deterministic algorithms are asked for where somebody debugs, on one of three ranks.

variant of: autocast_on_one_rank
seen in: -
ranks: 3
expect: DDP213
cause: the setting of deterministic algorithms differs: False on ranks 0-1; True on rank 2
step: 3
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(62)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for step in range(8):
        if step == 3 and rank == 2:
            torch.use_deterministic_algorithms(True)
        inputs = torch.randn(8, 8, generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
