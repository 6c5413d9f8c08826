"""`set_epoch` is called, on a sampler that no loader uses.

variant of: set_epoch_forgotten
seen in: -
ranks: 3
expect: DDP303
cause: set_epoch was not called
stage: forward
step: 5
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def loader_of(dataset):
    batches = BatchSampler(DistributedSampler(dataset), batch_size=4, drop_last=True)
    return DataLoader(dataset, batch_sampler=batches)


def train():
    torch.manual_seed(43)
    dataset = TensorDataset(torch.randn(60, 5))
    model = DDP(nn.Sequential(nn.Linear(5, 9), nn.CELU(), nn.Linear(9, 5)))
    optimizer = torch.optim.ASGD(model.parameters(), lr=1e-2)
    loader, sampler = loader_of(dataset), DistributedSampler(dataset)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
