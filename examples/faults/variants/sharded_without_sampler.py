"""FSDP2 without a sampler: every rank draws the same batches from a shuffled loader with the same seed.

variant of: no_distributed_sampler
ranks: 2
also: DDP606
expect: DDP301
cause: no sampler splits the data
stage: forward
step: 0
outliers: 0 1
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def train():
    torch.manual_seed(81)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    for _ in range(2):
        for inputs, labels in DataLoader(dataset, batch_size=8, shuffle=True):
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
