"""The sampler is seeded with the rank: each rank cuts its share from another shuffle.

Shares overlap, and some samples are never seen. Sizes, lengths and batch counts are all as they should be.

bug: 30
seen in: LongLive#71
ranks: 2
expect: DDP302
cause: seeds differ
stage: forward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train():
    seed = 1234 + dist.get_rank()  # meant for dropout
    torch.manual_seed(12)
    dataset = TensorDataset(torch.randn(64, 3, 8))
    model = DDP(nn.Sequential(nn.Conv1d(3, 5, 3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(30, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (signals,) in loader:
            optimizer.zero_grad()
            model(signals).abs().mean().backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
