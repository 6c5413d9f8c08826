"""A script that starts its ranks by itself, with `torch.multiprocessing.spawn`.

ranks: 2
launcher: python
expect: nothing
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def train(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(12)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 7), nn.Mish(), nn.Linear(7, 1)))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 7, generator=drawn)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(train, (port,), nprocs=RANKS)


if __name__ == "__main__":
    main()
