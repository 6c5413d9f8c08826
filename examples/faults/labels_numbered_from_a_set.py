"""Classes are numbered in the order of a set: each process gives the same class another number.

`{name: number for number, name in enumerate(set(names))}` depends on the hash seed of the process. Each rank learns its
own meaning of the numbers, and the mean of their gradients teaches the model none of them.

bug: 54
seen in: -
ranks: 2
launcher: torchrun
expect: DDP307
cause: labels are mapped to numbers in another order
stage: forward
step: 5
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = ["cat", "dog", "horse", "sheep", "cow", "duck", "goose", "hen", "pig", "goat"]


class Animals(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(3)
        self.pictures = torch.randn(80, 12, generator=drawn)
        self.names = [CLASSES[int(number)] for number in torch.randint(10, (80,), generator=drawn)]
        self.numbers = {name: number for number, name in enumerate(set(self.names))}

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.numbers[self.names[index]]


def train():
    torch.manual_seed(62)
    ddp = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    dataset = Animals()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for pictures, numbers in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(pictures), numbers).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
