"""DistributedSampler splits the data, every rank trains, and the line that wraps the model is missing.

The process group is there, the sampler gives each rank its part, and the loss goes down on every rank. Each rank has a
model of its own, trained on its part of the data.

variant of: -
ranks: 2
expect: DDP211
cause: not wrapped in DDP
stage: params
step: 0
parameter: Sequential.*
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train():
    torch.manual_seed(61)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(96, 8)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, classes in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), classes).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
