"""One rank of three builds its branches sorted by cost, measured on its own machine.

variant of: parameters_in_set_order
seen in: -
ranks: 3
expect: DDP103
cause: the same names in another order
stage: init.before
step: none
outliers: 2
parameter: branches.wide.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Branches(nn.Module):
    def __init__(self, costs):
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Conv1d(1, 1, 3) for name in sorted(costs, key=costs.get)})

    def forward(self, signal):
        return sum(branch(signal) for branch in self.branches.values())


def train():
    rank = dist.get_rank()
    costs = {"wide": 1.0, "deep": 1.2 if rank != 2 else 0.9, "cheap": 1.5}
    torch.manual_seed(35)
    model = DDP(Branches(costs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        signal = torch.randn(4, 1, 9, generator=data)
        optimizer.zero_grad()
        model(signal).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
