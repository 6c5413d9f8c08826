"""GradScaler's scale follows a rank's own loss: unscaling gives another gradient on each rank.

A home-made guard lowers the scale when the loss of this rank gets large. The loss is multiplied by one scale here and
another there, DDP averages the mixture, and each rank divides it by its own scale.

bug: 13
seen in: pytorch#136009
ranks: 3
expect: DDP206
cause: GradScaler.scale
stage: params
step: 3
outliers: 2
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(41)
    ddp = DDP(nn.Sequential(nn.Linear(8, 16), nn.Hardswish(), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
    data = torch.Generator().manual_seed(130 + rank)
    for step in range(6):
        inputs = torch.randn(4, 8, generator=data)
        if step == 2 and rank == 2:
            inputs[0] *= 40  # one odd sample
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(inputs), inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(scaler.get_scale() / 2 if loss.item() > 10 else None)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
