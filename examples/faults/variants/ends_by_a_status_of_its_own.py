"""A job that ends with exit status 3 because its metric is too low, on all ranks and after closing its process group.

No rank died, and the report must not say that one did.

variant of: rank_raises
seen in: -
ranks: 2
exit: fails
expect: DDP602
severity: note
cause: the program's own exit status: no rank died
step: none
outliers: 0 1
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(96)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(5):
        inputs = torch.randn(8, 8, generator=drawn)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss = train()
    dist.destroy_process_group()
    if loss > 0.01:
        sys.exit(3)


if __name__ == "__main__":
    main()
