"""A rank of a multi-node job, with faults on one host on request.

Started by torchrun, by a shell with RANK and WORLD_SIZE set, or by Slurm's srun.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--diverge-at", type=int, help="from this step on the faulty host has its own learning rate"
    )
    parser.add_argument("--faulty-host", default="node1")
    parser.add_argument("--clock-ahead", type=float, default=0.0, help="seconds, on the faulty host")
    options = parser.parse_args()
    faulty = socket.gethostname() == options.faulty_host
    if faulty and options.clock_ahead:
        # Network namespaces share the machine's clock, so this simulates a host whose clock is wrong.
        right = time.time
        time.time = lambda: right() + options.clock_ahead

    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        if faulty and step == options.diverge_at:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=inputs)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
