"""A bit of one rank's own gradient flips before the reduction, once.

All ranks receive the same mean of a wrong gradient, so parameters and reduced gradients agree everywhere. The layer
only simulates the hardware: memory without error correction, or a core that computes a wrong value now and then.

variant of: -
ranks: 3 4
options: --audit every=3
expect: DDP217
cause: rank 1 gave wrong values in the backward
stage: local
step: 6
outliers: 1
parameter: 0.bias
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BROKEN_RANK, BROKEN_STEP = 1, 6


class Hardware:
    """Corrupts one value when it is due."""

    due = False


class Corrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Hardware.due:
            Hardware.due = False
            gradient = gradient.clone()
            gradient.view(-1).view(torch.int32)[5] ^= 1 << 24
        return gradient


class Layer(nn.Module):
    def forward(self, values):
        return Corrupted.apply(values)


def train():
    torch.manual_seed(31)
    model = DDP(nn.Sequential(nn.Linear(7, 10), Layer(), nn.GELU(), nn.Dropout(0.1), nn.Linear(10, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(500 + dist.get_rank())
    for step in range(10):
        Hardware.due = dist.get_rank() == BROKEN_RANK and step == BROKEN_STEP
        inputs, targets = torch.randn(6, 7), torch.randint(3, (6,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
