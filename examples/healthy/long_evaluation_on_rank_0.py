"""Rank 0 evaluates for long, around the wrapper, while the others wait for it at a barrier: slow, but no hang.

ranks: 2 3
expect: nothing
options: --hang-timeout 1
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = 3.0


def evaluate(net: nn.Module) -> None:
    """As long as three timeouts; the first forward after training would broadcast buffers, the net itself does not."""
    net.eval()
    end = time.monotonic() + SECONDS
    with torch.no_grad():
        while time.monotonic() < end:
            net(torch.ones(64, 8))
    net.train()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
        if step == 3:
            if rank == 0:
                evaluate(net)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
