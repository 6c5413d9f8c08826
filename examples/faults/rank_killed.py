"""A rank is killed in the middle of training, as by the kernel when memory runs out.

It says nothing. The others complain of a closed connection, and their errors are all there is to read.

bug: 41
seen in: -
ranks: 3
launcher: torchrun
expect: DDP602
cause: killed
stage: params
step: 4
outliers: 1
exit: fails
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(23)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(10):
        if step == 5 and rank == 1:
            time.sleep(0.3)  # memory fills up
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(8, 16, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
