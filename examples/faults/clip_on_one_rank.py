"""Clipping switched on by a flag that only rank 0 was given.

Rank 0 reads the configuration, the others run with its defaults: the averaged gradient is shortened on one
rank of three.

bug: 21
seen in: DeepSpeed PR#1801
ranks: 3
expect: DDP205
cause: on rank 0 only
stage: applied
step: 2
outliers: 0
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    settings = {"clip": 0.05, "clip_from": 2} if rank == 0 else {"clip": None, "clip_from": 2}
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Conv1d(2, 6, 3), nn.GELU(), nn.Flatten(), nn.Linear(36, 4)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        signals = torch.randn(8, 2, 8, generator=data)
        classes = torch.randint(4, (8,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(signals), classes).backward()
        if settings["clip"] is not None and step >= settings["clip_from"]:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
