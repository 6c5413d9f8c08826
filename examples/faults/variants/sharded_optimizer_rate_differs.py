"""ZeroRedundancyOptimizer with another learning rate on rank 1, from step 3 on.

Each rank updates its own part of the parameters and broadcasts it. All replicas stay equal, and the parameters of rank
1's part are trained with the wrong rate.

variant of: optimizer_settings_differ
seen in: -
ranks: 2
expect: DDP206
cause: lr
stage: params
step: 3
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    torch.manual_seed(8)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    data = torch.Generator().manual_seed(60 + dist.get_rank())
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
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
