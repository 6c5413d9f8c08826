"""Shuffled data without a DistributedSampler, and the same seed everywhere.

Every rank draws the same batches in the same order: all but one of them work for nothing, and the batch is
half of what it is taken for.

bug: 29
seen in: openspeech#149
ranks: 2
expect: DDP301
cause: no sampler splits the data
stage: forward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def train():
    torch.manual_seed(11)
    inputs = torch.randn(40, 9)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = DDP(nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    for _ in range(2):
        for batch, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), classes).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
