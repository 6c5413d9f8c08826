"""After a restart one rank of three counts its epochs from another number: `set_epoch` gets two values.

variant of: sampler_seed_differs
seen in: -
ranks: 3
expect: DDP302
cause: set_epoch received another number on some rank
stage: forward
step: 0
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train():
    rank = dist.get_rank()
    first_epoch = 4 if rank == 1 else 5
    torch.manual_seed(42)
    dataset = TensorDataset(torch.randn(60, 5))
    model = DDP(nn.Sequential(nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(dataset)
    for epoch in range(first_epoch, first_epoch + 2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(dataset, batch_size=5, sampler=sampler):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
