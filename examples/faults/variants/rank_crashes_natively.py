"""One of three ranks crashes in native code, in the middle of its backward.

variant of: rank_killed
seen in: -
ranks: 3
expect: DDP602
cause: crashed in native code
stage: params
step: 1
outliers: 2
exit: fails
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Extension(torch.autograd.Function):
    """Simulates a compiled operation with a bug in its backward."""

    @staticmethod
    def forward(ctx, values, broken):
        ctx.broken = broken
        return values * 1.0

    @staticmethod
    def backward(ctx, gradient):
        if ctx.broken:
            time.sleep(0.3)  # records are handed over beside the training
            os.kill(os.getpid(), signal.SIGSEGV)
        return gradient, None


def train():
    rank = dist.get_rank()
    torch.manual_seed(49)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        output = model(torch.randn(4, 6, generator=data))
        optimizer.zero_grad()
        Extension.apply(output, step == 2 and rank == 2).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
