"""A rank whose own loss has stalled starts over with a new optimizer; the others keep their momenta.

variant of: optimizer_state_on_rank_0
seen in: -
ranks: 3
expect: DDP206
cause: an optimizer was recreated on some ranks only
stage: params
step: 3
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(79)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(800 + rank)
    for step in range(6):
        if step == 3 and rank == 2:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        inputs, labels = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
