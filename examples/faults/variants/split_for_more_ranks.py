"""The job shrank from four ranks to two, the number in the settings did not: half of the data is never seen.

variant of: sampler_seed_differs
seen in: -
ranks: 2
expect: DDP302
cause: among 4, but 2 ranks train
stage: forward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

REPLICAS = 4


def train():
    rank = dist.get_rank()
    torch.manual_seed(57)
    dataset = TensorDataset(torch.randint(30, (96, 4)), torch.randn(96, 1))
    model = DDP(nn.Sequential(nn.Embedding(30, 5), nn.Flatten(), nn.Linear(20, 1)))
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(dataset, num_replicas=REPLICAS, rank=rank, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, batch_size=6, drop_last=True))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for words, scores in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(words), scores).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
