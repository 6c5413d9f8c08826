"""Samples are read into one tensor in the order of a set of names: nothing but their contents shows the order.

variant of: files_in_another_order
seen in: -
ranks: 3
launcher: torchrun
expect: DDP307
cause: the list of samples has another order on each rank
stage: forward
step: 0
outliers: 0 1 2
"""

import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def read(name):
    return torch.randn(9, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def train():
    torch.manual_seed(65)
    ddp = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 9)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    names = {f"recording {number}" for number in range(96)}
    dataset = TensorDataset(torch.stack([read(name) for name in names]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (sounds,) in loader:
            optimizer.zero_grad()
            F.mse_loss(ddp(sounds), sounds.roll(1, 1)).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
