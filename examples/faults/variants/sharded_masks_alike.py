"""FSDP2: every rank seeds its generator alike after sharding, so all draw the same dropout masks.

variant of: same_masks_seeded_late
ranks: 2
also: DDP606
expect: DDP306
cause: every rank seeded its generator with the same number
stage: forward
step: 0
outliers: 0 1
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def train():
    torch.manual_seed(84)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(181 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs.sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
