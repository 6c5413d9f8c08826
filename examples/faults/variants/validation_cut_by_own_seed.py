"""Every rank cuts off its own validation set: `random_split` with a seed of the rank's own.

What one rank validates on another one trains on, and a DistributedSampler deals out sets that are not the same.

variant of: sampler_seed_differs
seen in: -
ranks: 2
expect: DDP302
cause: cut or shuffled with another seed
stage: forward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def train():
    drawn = torch.Generator().manual_seed(74)
    everything = TensorDataset(
        torch.randn(120, 5, generator=drawn), torch.randint(3, (120,), generator=drawn)
    )
    torch.manual_seed(500 + dist.get_rank())
    training, validation = random_split(everything, [96, 24])
    sampler = DistributedSampler(training)
    model = DDP(nn.Sequential(nn.Linear(5, 14), nn.ReLU(), nn.Linear(14, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in DataLoader(training, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for inputs, _ in DataLoader(validation, batch_size=12):
                model.module(inputs)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
