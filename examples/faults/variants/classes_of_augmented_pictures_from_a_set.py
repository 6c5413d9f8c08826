"""Classes are numbered in the order of a set, and no two pictures are equal: only the numbers can be compared.

variant of: labels_numbered_from_a_set
seen in: -
ranks: 2
launcher: torchrun
expect: DDP307
cause: labels are mapped to numbers in another order
stage: forward
step: 6
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = ["red", "green", "blue", "yellow", "black", "white", "brown", "pink"]


class Colours(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(4)
        self.pictures = torch.randn(96, 12, generator=drawn)
        self.names = [CLASSES[int(number)] for number in torch.randint(8, (96,), generator=drawn)]
        self.numbers = {name: number for number, name in enumerate(set(CLASSES))}

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        noisy = self.pictures[index] + 0.1 * torch.randn(12)
        return noisy, self.numbers[self.names[index]]


def train():
    torch.manual_seed(64)
    ddp = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8)))
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    dataset = Colours()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1)
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
