"""The global batch does not divide by the ranks: one of two gets fewer samples in every step.

variant of: uneven_last_batch
seen in: -
ranks: 2
expect: DDP305
cause: regardless of the number of samples
stage: forward
step: 0
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH = 11


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(45)
    model = DDP(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(3)
    for _ in range(5):
        share = torch.randn(GLOBAL_BATCH, 7, generator=data).chunk(ranks)[rank]
        optimizer.zero_grad()
        model(share).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
