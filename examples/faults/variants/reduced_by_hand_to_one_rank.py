"""Gradients are reduced by hand with `reduce` in place of `all_reduce`: only rank 0 gets the result.

variant of: reduced_by_hand_rank_left_out
ranks: 3
expect: DDP211
cause: ranks 1-2 do not apply the reduced gradients
stage: params
step: 0
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def train():
    torch.manual_seed(66)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(460 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, dst=0)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
