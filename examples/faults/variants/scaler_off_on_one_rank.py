"""GradScaler is switched off on one rank, whose device is of another kind: its gradients enter the mean unscaled.

variant of: scaler_set_per_rank
seen in: -
ranks: 3
expect: DDP206
cause: GradScaler is off on rank 1 only
step: 0
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(86)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=rank != 1)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
        inputs = torch.randn(16, 8, generator=drawn)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), inputs[:, :4].argmax(1))).backward()
        scaler.step(optimizer)
        scaler.update()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
