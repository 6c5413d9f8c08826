"""Gradients are reduced by hand in a group that lacks a rank: two ranks agree, the third trains alone.

variant of: reduced_by_hand_wrong_group
seen in: -
ranks: 3
expect: DDP211
cause: rank 2 takes no part
stage: params
step: 0
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def train():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    group = dist.new_group([0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(70 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 8, generator=draw)
        labels = torch.randint(0, 4, (16,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            if dist.get_rank(group) >= 0:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= 2
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
