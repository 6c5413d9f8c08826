"""The schedule divides integers: the learning rate is zero at every step, and nothing is trained.

variant of: features_without_gradient
seen in: -
ranks: 2
expect: DDP215
cause: the learning rate is zero at every step
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    torch.manual_seed(85)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step // 1000, 1))
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(14):
        inputs = torch.randn(16, 8, generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
        schedule.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
