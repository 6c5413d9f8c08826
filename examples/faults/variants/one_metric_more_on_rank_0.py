"""Rank 0 reduces one metric more than the others: the sizes differ, and the backend ends the process that notices.

variant of: gather_on_one_rank
seen in: -
ranks: 2
exit: fails
expect: DDP602
cause: collective mismatch
step: 3
outliers: 1
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def report(loss, step):
    metrics = [loss.item(), 1.0]
    if dist.get_rank() == 0:
        metrics += [float(step)] * 64  # its file is newer
    reduced = torch.tensor(metrics)
    dist.all_reduce(reduced)


def train():
    rank = dist.get_rank()
    torch.manual_seed(93)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(rank)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 8, generator=drawn)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 3:
            time.sleep(0.3)  # records are handed over beside the training
            report(loss, step)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
