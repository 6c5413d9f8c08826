"""Shards are chosen by the rank modulo the number of files: two of three ranks read the same one.

variant of: everyone_is_rank_zero
seen in: -
ranks: 3
expect: DDP301
cause: ranks received the same data
stage: forward
step: 0
outliers: 0 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FILES = 2


def shard(number):
    rows = torch.Generator().manual_seed(1000 + number)
    return torch.randn(40, 6, generator=rows)


def train():
    rank = dist.get_rank()
    torch.manual_seed(41)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in shard(rank % FILES).split(8):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
