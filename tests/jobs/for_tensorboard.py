"""Two forked ranks train over gloo; from step 30 on rank 1 uses another learning rate.

Each rank prints the loss of every step. python for_tensorboard.py
"""

from __future__ import annotations

import os
import sys
import time

import forking
import torch
import torch.distributed as dist
import variants
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANKS = 2
STEPS = 40
DIVERGES_AT = 30
# Seconds between steps: long enough for the launcher to sample the node several times.
PAUSE = 0.05


def rank_main(rank: int) -> None:
    variants.make_group(rank, RANKS)
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(STEPS):
        if step == DIVERGES_AT and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.zero_grad()
        loss = ddp(torch.randn(64, 256)).square().mean()
        loss.backward()
        optimizer.step()
        os.write(1, f"loss {rank} {step} {loss.item():.9g}\n".encode())
        time.sleep(PAUSE)
    dist.destroy_process_group()


def main() -> None:
    forking.prepare()
    sys.exit(not forking.run_ranks(rank_main, RANKS).ok)


if __name__ == "__main__":
    main()
