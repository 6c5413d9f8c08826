"""Adapters go in after two steps and train beside the rest of the model.

What was wrapped is still reduced. The adapter alone is not, and its own optimizer steps it.

variant of: adapters_added_late
seen in: FastVideo#1666
ranks: 3
expect: DDP104
cause: added after wrapping
stage: params
step: 2
outliers: 0 1 2
parameter: adapter.weight
launcher: torchrun
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.adapter = None
        self.head = nn.Linear(6, 2)

    def forward(self, images):
        hidden = F.silu(self.conv(images)).mean((2, 3))
        if self.adapter is not None:
            hidden = hidden + self.adapter(hidden)
        return self.head(hidden)


def train():
    torch.manual_seed(6)
    model = Tower()
    ddp = DDP(model)
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.05)]
    data = torch.Generator().manual_seed(30 + dist.get_rank())
    for step in range(5):
        if step == 2:
            model.adapter = nn.Linear(6, 6)
            optimizers.append(torch.optim.Adam(model.adapter.parameters(), lr=1e-2))
        images = torch.randn(4, 1, 6, 6, generator=data)
        labels = torch.randint(2, (4,), generator=data)
        ddp.zero_grad()
        F.cross_entropy(ddp(images), labels).backward()
        for optimizer in optimizers:
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
