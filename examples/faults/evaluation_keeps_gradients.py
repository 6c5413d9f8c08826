"""The validation calls the DDP module without torch.no_grad(), so that DDP broadcasts all buffers before each forward.

The result is right. The broadcasts, and the activations that are kept for a backward that never comes, are not needed.

bug: 56
seen in: -
ranks: 2
expect: DDP408
severity: note
cause: without torch.no_grad()
stage: buffers
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def validate(model, loader):
    model.eval()
    right = total = 0
    for images, labels in loader:
        right += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    counts = torch.tensor([right, total])
    dist.all_reduce(counts)
    model.train()
    return counts[0].item() / counts[1].item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    drawn = torch.Generator().manual_seed(2)
    dataset = TensorDataset(
        torch.randn(320, 3, 8, 8, generator=drawn), torch.randint(5, (320,), generator=drawn)
    )
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    model = DDP(nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(dataset)
    training = DataLoader(dataset, batch_size=8, sampler=sampler)
    validation = DataLoader(dataset, batch_size=40, sampler=DistributedSampler(dataset, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in training:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        validate(model, validation)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
