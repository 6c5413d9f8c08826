"""Two forked ranks train over gloo; from step 30 on rank 1 steps with another learning rate.

Each rank prints the loss of every step. python for_tensorboard.py FOLDER
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANKS = 2
STEPS = 40
PARTING = 30
# The launcher samples the node twice a second.
PAUSE = 0.05


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(STEPS):
        if step == PARTING and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.zero_grad()
        loss = ddp(torch.randn(64, 256)).square().mean()
        loss.backward()
        optimizer.step()
        os.write(1, f"loss {rank} {step} {loss.item():.9g}\n".encode())
        time.sleep(PAUSE)
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, folder)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
