"""`sampler.set_epoch` is never called, so every epoch comes in the order of the first.

The sampler says shuffle=True and does shuffle: from seed + epoch, and its epoch stays 0.

bug: 33
seen in: pytorch#31771
ranks: 2
expect: DDP303
cause: set_epoch was not called
stage: forward
step: 4
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train():
    torch.manual_seed(15)
    dataset = TensorDataset(torch.randn(48, 1, 5, 5), torch.randint(3, (48,)))
    model = DDP(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-4)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler)
    for _ in range(3):
        for images, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), classes).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
