"""One rank sums with another number of threads, from a variable of its host: other last bits for the same batch.

Replicas stay equal and nothing is wrong with the training. It cannot be repeated bit for bit on other hosts.

variant of: autocast_on_one_rank
seen in: -
ranks: 3
expect: DDP213
severity: note
cause: the number of threads differs: 1 on ranks 0-1; 2 on rank 2
step: 0
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(63)
    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
        inputs = torch.randn(256, 64, generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(2 if dist.get_rank() == 2 else 1)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
