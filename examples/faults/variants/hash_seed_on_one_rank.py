"""One host's start script exports PYTHONHASHSEED: sets of texts have another order there than on the other ranks.

variant of: parameters_in_set_order
seen in: -
ranks: 3
launcher: environment
expect: DDP213
severity: note
cause: the hash seed differs: random on ranks 0 and 2; 0 on rank 1
step: 0
outliers: 1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

if os.environ["RANK"] == "1" and "PYTHONHASHSEED" not in os.environ:  # what the other host's script does
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})


def train():
    rank = dist.get_rank()
    torch.manual_seed(66)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
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
