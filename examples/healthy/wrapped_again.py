"""`DDP(...)` raises on its first call, on all ranks or on one, and the second call succeeds.

ranks: 2 3
expect: nothing
cases: on_all_ranks on_one_rank another_module
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def wrapped(network: nn.Module, **refused: object) -> DistributedDataParallel:
    if refused:
        try:
            return DistributedDataParallel(network, **refused)
        except (ValueError, TypeError):
            pass
    return DistributedDataParallel(network)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(29)
    network = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    if case == "on_all_ranks":
        model = wrapped(network, device_ids=[0])
    elif case == "on_one_rank":
        model = wrapped(network, **({"bucket_size": 25} if rank == 0 else {}))
    else:
        try:
            # Nothing to train in it.
            DistributedDataParallel(nn.Linear(3, 3).requires_grad_(False))
        except RuntimeError:
            model = wrapped(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(90 + rank)
    for _ in range(5):
        inputs = torch.randn(8, 6, generator=drawn)
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), inputs[:, :2].sin()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
