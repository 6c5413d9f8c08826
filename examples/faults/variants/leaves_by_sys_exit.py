"""A rank that meets bad data calls `sys.exit(0)`, as if its work were done.

Its connections close, and the others fail in the next AllReduce with an error about a peer.

variant of: early_stop_on_some_ranks
ranks: 3
expect: DDP602
cause: early stop on some ranks
step: 2
outliers: 2
exit: fails
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        batch = torch.randn(16, 8, generator=data)
        if step == 3 and rank == 2:
            batch[0, 0] = float("nan")
        if batch.isnan().any():
            print("bad batch, nothing left to do")
            sys.exit(0)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
