"""The square root of a norm that is exactly zero: finite forward, NaN in the backward of the layers before it.

variant of: nan_spreads
seen in: -
ranks: 2
expect: DDP209
cause: in 2 of its 4 gradients, first in that of before
stage: local
step: 3
outliers: 0
parameter: before.*
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(5, 5)
        self.after = nn.Linear(1, 2)

    def forward(self, inputs, masks):
        hidden = self.before(inputs) * masks
        return self.after(hidden.square().sum(1, keepdim=True).sqrt())


def train():
    rank = dist.get_rank()
    torch.manual_seed(34)
    model = DDP(Unit())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        inputs = torch.randn(4, 5, generator=data)
        masks = (torch.rand(4, 5, generator=data) > 0.2).float()
        masks[:, 0] = 1.0
        if step == 3 and rank == 0:
            masks[2] = 0.0
        optimizer.zero_grad()
        model(inputs, masks).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
