"""A hook that was meant to undo a scale is registered on one rank only: its gradients are four times as large.

variant of: loss_not_divided_on_one_rank
seen in: -
ranks: 3
expect: DDP218
severity: note
cause: hooks of rank 1 scale
step: 0
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(83)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if rank == 1:
        for parameter in network.parameters():
            parameter.register_hook(lambda gradient: gradient * 4)
    model = DDP(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(20):
        inputs, labels = torch.randn(32, 8, generator=drawn), torch.randint(4, (32,), generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
