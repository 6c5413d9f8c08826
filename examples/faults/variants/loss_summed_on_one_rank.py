"""One rank's configuration sums the loss over the batch, the others take the mean: its samples count sixteen times.

Replicas stay equal, and the model follows one rank's data.

variant of: -
seen in: -
ranks: 3
expect: DDP218
cause: a sum over the batch on rank 2
step: 0
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    reduction = {"host-c": "sum"}.get(f"host-{'abc'[rank]}", "mean")  # a configuration file of each host
    torch.manual_seed(80)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(10):
        inputs = torch.randn(16, 8, generator=drawn)
        labels = inputs[:, :4].argmax(1)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels, reduction=reduction).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
