"""One rank skips zero_grad from step 3 on: its old gradients go into every mean again.

The line slipped into the branch that only ranks with a progress bar take. All ranks receive the same mean, so replicas
stay equal; a third of the old mean is in each new one.

bug: 44
seen in: -
ranks: 3
expect: DDP214
cause: old gradients on rank 1
step: 4
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = DDP(nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    quiet = False
    for step in range(9):
        inputs = torch.randn(8, 9, generator=drawn)
        F.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        optimizer.step()
        if step == 3:
            quiet = rank == 1  # the rank's terminal was closed
        if not quiet:
            print(f"step {step}", end="\r")
            optimizer.zero_grad()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
