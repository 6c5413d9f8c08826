"""FSDP2 with a DistributedSampler whose epoch is never set: every epoch has the same order.

variant of: set_epoch_forgotten
ranks: 2
also: DDP606
expect: DDP303
cause: set_epoch was not called
outliers: 0 1
step: 4
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train():
    torch.manual_seed(82)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    for _ in range(3):
        for inputs, labels in loader:
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
