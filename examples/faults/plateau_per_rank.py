"""`ReduceLROnPlateau` is fed each rank's own loss: learning rates part.

The scheduler sees the validation loss of the rank's own share. On one rank the loss stops falling first, and its
learning rate drops while the others go on.

bug: 14
seen in: disruptcnn#3
ranks: 3
expect: DDP206
cause: hyperparameters differ: lr
stage: params
step: 3
outliers: 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau


def train():
    rank = dist.get_rank()
    torch.manual_seed(43)
    ddp = DDP(nn.Sequential(nn.Conv1d(1, 4, 3), nn.ELU(), nn.Flatten(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.8)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    data = torch.Generator().manual_seed(140 + rank)
    held_out = torch.randn(12, 1, 8, generator=data)
    for step in range(6):
        series = torch.randn(12, 1, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(series).squeeze(-1), series.mean((1, 2))).backward()
        optimizer.step()
        with torch.no_grad():
            target = held_out.mean((1, 2)) if rank != 1 else torch.full((12,), 3.0 + max(step - 1, 0))
            loss = F.mse_loss(ddp.module(held_out).squeeze(-1), target)
        scheduler.step(loss)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
