"""ZeroRedundancyOptimizer, and a warm-up that never begins on one rank: the parameters of its part are never trained.

All replicas stay equal.

variant of: optimizer_settings_differ
seen in: -
ranks: 2
expect: DDP206
cause: lr
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(94)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.0 if rank == 1 else 1e-2)
    data = torch.Generator().manual_seed(60 + rank)
    for _ in range(6):
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs[:, :2].sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
