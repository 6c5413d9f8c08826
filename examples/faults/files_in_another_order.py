"""The list of files has another order on each rank: a sampler that splits the indices does not split the files.

Index 7 is one file on rank 0 and another one on rank 1. In each epoch some files are used twice and others not at all.
`os.listdir` and `glob` promise no order either, and give another one on another file system.

bug: 55
seen in: -
ranks: 2
launcher: torchrun
expect: DDP307
cause: the list of samples has another order on each rank
stage: forward
step: 0
outliers: 0 1
"""

import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def listed():
    """Without doubles: those that are in two folders are listed once."""
    everything = [f"part{number % 4}/{number:05d}.png" for number in range(96)]
    return list(set(everything + everything[:10]))


class Files(Dataset):
    def __init__(self):
        self.files = listed()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        name = self.files[index]
        content = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(10, generator=content), int(name[4])


def train():
    torch.manual_seed(63)
    ddp = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    dataset = Files()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for pictures, folders in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(pictures), folders).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
