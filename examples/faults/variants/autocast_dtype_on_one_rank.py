"""Ranks choose the dtype of mixed precision by what they take their device for: one computes in float16.

variant of: autocast_on_one_rank
seen in: -
ranks: 3
expect: DDP213
cause: autocast.dtype differs: bfloat16 on ranks 1-2; float16 on rank 0
step: 0
outliers: 0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    chosen = torch.float16 if rank == 0 else torch.bfloat16
    torch.manual_seed(64)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
        inputs = torch.randn(8, 12, generator=drawn)
        with torch.autocast("cpu", dtype=chosen):
            outputs = model(inputs)
        optimizer.zero_grad()
        (outputs.float() - inputs[:, :2]).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
