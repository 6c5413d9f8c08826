"""FSDP1: rank 1 gets a sampler for three ranks, of which there are two: samples are missing and counted twice.

variant of: -
ranks: 2
expect: DDP302
also: DDP606
cause: samplers split the data among 3, but 2 ranks train
stage: forward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train():
    torch.manual_seed(95)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(60, 8), torch.randint(0, 4, (60,)))
    sampler = DistributedSampler(dataset, num_replicas=3, rank=dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(dataset, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
