"""The loader returns names of classes, and each rank numbers them as they first appear in its own batches.

variant of: labels_numbered_from_a_set
seen in: -
ranks: 2
expect: DDP307
cause: labels are mapped to other classes after the data loader
stage: backward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NAMES = ["cat", "dog", "horse", "sheep", "cow", "duck"]


class Animals(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(5)
        self.pictures = torch.randn(320, 12, generator=drawn)
        self.names = [NAMES[int(number)] for number in torch.randint(6, (320,), generator=drawn)]

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.names[index]


def train():
    torch.manual_seed(68)
    ddp = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, len(NAMES))))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    dataset = Animals()
    numbers = {}
    for pictures, names in DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset)):
        labels = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
        optimizer.zero_grad()
        F.cross_entropy(ddp(pictures), labels, label_smoothing=0.1).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
