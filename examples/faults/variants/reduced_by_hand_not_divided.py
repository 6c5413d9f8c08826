"""Gradients summed by hand and never divided by the number of ranks.

The loss is a mean over the rank's own batch, so the sum is as many times too large as there are ranks. The gradients of
the very first backward are not observed: without DDP, the first step shows what is trained.

variant of: -
ranks: 2
expect: DDP204
cause: the sum over ranks
stage: applied
step: 1
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def train():
    torch.manual_seed(78)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    data = torch.Generator().manual_seed(370 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
