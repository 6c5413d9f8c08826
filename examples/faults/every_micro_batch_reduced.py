"""Four micro-batches are accumulated for a step, and DDP reduces all gradients after each of them.

The result is right. Three of four reductions are not needed.

bug: 48
seen in: -
ranks: 2
expect: DDP406
cause: without no_sync
stage: wait
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = DDP(nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(40):
        for _ in range(4):
            inputs = torch.randn(2, 1024, generator=drawn)
            ((model(inputs) - inputs[:, :16]).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
