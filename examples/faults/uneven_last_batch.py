"""The rest of the data in a last batch that is smaller on one rank.

Each rank averages over its own samples and DDP averages the ranks, so the two samples of the small batch count
four times as much as the eight of the others.

bug: 35
seen in: transformers#34242
ranks: 3
expect: DDP305
cause: regardless of the number of samples
stage: forward
step: 3
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def train():
    rank = dist.get_rank()
    torch.manual_seed(18)
    inputs = torch.randn(90, 5)
    dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    share = range(rank * 32, min(len(dataset), (rank + 1) * 32))
    loader = DataLoader(Subset(dataset, share), batch_size=8)
    model = DDP(nn.Sequential(nn.Linear(5, 10), nn.Softplus(), nn.Linear(10, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for batch, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), targets).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
