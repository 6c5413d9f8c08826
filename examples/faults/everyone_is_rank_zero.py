"""The rank is read from a variable that this launcher does not set: for the sampler, every rank is number 0.

All ranks take the first share and no rank the others: the same batches everywhere, and the rest of the data is
never seen.

bug: 31
seen in: icefall#1616
ranks: 3
expect: DDP301
cause: is configured as rank 0 of 3
stage: forward
step: 0
outliers: 0 1 2
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train():
    rank = int(os.environ.get("SLURM_TRAINING_RANK", "0"))
    torch.manual_seed(13)
    tokens = torch.randint(50, (60, 6))
    dataset = TensorDataset(tokens)
    net = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 50))
    model, optimizer = DDP(net), torch.optim.Adagrad(net.parameters(), lr=0.02)
    sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(dataset, batch_size=5, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), batch[:, 0]).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
