"""A layer of the wrapped model is exchanged: DDP goes on waiting for the old one.

The head grows by two classes after two steps. DDP knows the old head's parameters only. With
`find_unused_parameters=True`, which the first error message advised, it counts them as unused and stays silent, and
every rank trains a new head of its own.

bug: 3
seen in: pytorch#12603
ranks: 2
expect: DDP104
cause: replaced after wrapping
stage: params
step: 2
outliers: 0 1
parameter: head.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.LayerNorm(24))
        self.head = nn.Linear(24, classes)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def grow_head(model, classes):
    old = model.head
    model.head = nn.Linear(old.in_features, classes)
    with torch.no_grad():
        model.head.weight[: old.out_features] = old.weight
        model.head.bias[: old.out_features] = old.bias


def train():
    torch.manual_seed(3)
    model = Classifier(classes=3)
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(50 + dist.get_rank())
    classes = 3
    for step in range(5):
        if step == 2:
            classes = 5
            grow_head(model, classes)
            optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
        inputs = torch.randn(8, 10, generator=data)
        labels = torch.randint(classes, (8,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
