"""The optimizer is made before the model is copied: it steps the original, and the copy is trained by no one.

The copy goes into DDP. Its gradients are computed and reduced at every step, and the loss never falls.

bug: 46
seen in: -
ranks: 2
expect: DDP215
also: DDP606
cause: in no module that runs
step: none
outliers: 0 1
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return copy.deepcopy(model), optimizer  # so that callers cannot change the template


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build()
    model = DDP(model)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(8, 8, generator=drawn)
        optimizer.zero_grad()
        model.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
