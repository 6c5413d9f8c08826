"""A model that draws the points it is trained on by itself, from one seed on every rank.

There is no batch to compare; the gradients show that all ranks do the same work.

variant of: no_distributed_sampler
seen in: -
ranks: 2
expect: DDP304
cause: train on the same data
stage: local
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Oscillator(nn.Module):
    """Learns x'' = -x from the equation alone."""

    def __init__(self):
        super().__init__()
        self.curve = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.drawn = torch.Generator().manual_seed(65)

    def forward(self):
        times = torch.rand(16, 1, generator=self.drawn).requires_grad_()
        position = self.curve(times)
        (speed,) = torch.autograd.grad(position.sum(), times, create_graph=True)
        (push,) = torch.autograd.grad(speed.sum(), times, create_graph=True)
        start = self.curve(torch.zeros(1, 1)) - 1
        return (push + position).square().mean() + start.square().sum()


def train():
    torch.manual_seed(65)
    model = DDP(Oscillator())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(6):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
