"""Process groups of other shapes: some ranks train, two halves train apart, a group is made a second time.

ranks: 4
expect: nothing
cases: some_ranks two_halves made_again
"""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(network: nn.Module, steps: int, group: dist.ProcessGroup | None = None) -> None:
    model = DistributedDataParallel(network, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=drawn)).square().mean().backward()
        optimizer.step()


def agreed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = torch.tensor(probe.getsockname()[1])
    dist.broadcast(port, 0)
    return int(port)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    network = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
    if case == "some_ranks":
        # The last one deals with something else, and joins the others at the end.
        trainers = dist.new_group([0, 1, 2])
        if rank < 3:
            train(network, 5, trainers)
        dist.barrier()
    elif case == "two_halves":
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        nn.init.normal_(network[0].weight, std=1.0 + rank // 2)
        train(network, 3 + 2 * (rank // 2), halves[rank // 2])
        dist.barrier()
    else:
        train(network, 3)
        # At another address: ranks that are quick would meet those who have not left the first group.
        address, ranks = f"tcp://127.0.0.1:{agreed_port()}", dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("gloo", address, rank=rank, world_size=ranks)
        train(network, 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
