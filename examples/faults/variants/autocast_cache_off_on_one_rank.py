"""The cache of autocast's casts is switched off on one rank: weights that are used twice are cast twice there.

variant of: autocast_on_one_rank
seen in: -
ranks: 3
expect: DDP213
cause: autocast.cache differs
step: 2
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(12, 12)

    def forward(self, inputs):
        return self.cell(self.cell(inputs).tanh())


def train():
    rank = dist.get_rank()
    torch.manual_seed(65)
    model = DDP(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for step in range(7):
        inputs = torch.randn(8, 12, generator=drawn)
        cached = not (rank == 1 and step >= 2)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            outputs = model(inputs)
        optimizer.zero_grad()
        (outputs.float() - inputs).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
