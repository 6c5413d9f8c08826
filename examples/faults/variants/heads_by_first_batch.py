"""Heads are made in the order in which each rank's first batch mentions their tasks.

variant of: parameters_in_set_order
seen in: -
ranks: 2
expect: DDP103
cause: the same names in another order
stage: init.before
step: none
outliers: 0 1
parameter: heads.depth.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FIRST_BATCH = {0: ["depth", "normals", "edges"], 1: ["edges", "depth", "normals"]}


class ManyTasks(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleDict({task: nn.Linear(6, 2) for task in tasks})

    def forward(self, inputs):
        return {task: head(self.trunk(inputs)) for task, head in self.heads.items()}


def train():
    rank = dist.get_rank()
    torch.manual_seed(36)
    model = DDP(ManyTasks(dict.fromkeys(FIRST_BATCH[rank])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        outputs = model(torch.randn(5, 6, generator=data))
        optimizer.zero_grad()
        sum(output.square().mean() for output in outputs.values()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
