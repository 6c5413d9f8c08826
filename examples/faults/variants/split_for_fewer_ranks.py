"""The job grew from two ranks to three, the number in the settings did not: two ranks take the same share.

variant of: everyone_is_rank_zero
seen in: -
ranks: 3
expect: DDP301
cause: ranks 0 and 2 are each configured as rank 0 of 2, but 3 ranks train
stage: forward
step: 0
outliers: 0 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

REPLICAS = 2


def train():
    drawn = torch.Generator().manual_seed(75)
    dataset = TensorDataset(torch.randn(80, 6, generator=drawn), torch.randn(80, 2, generator=drawn))
    sampler = DistributedSampler(dataset, num_replicas=REPLICAS, rank=dist.get_rank() % REPLICAS)
    torch.manual_seed(76)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(dataset, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
