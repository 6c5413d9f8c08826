"""An optimizer that adds noise to its updates (Langevin dynamics), each rank drawing its own.

Gradients, settings and state agree; what parts the replicas is in the update itself.

variant of: -
seen in: -
ranks: 3
expect: DDP201
cause: the update itself was not the same on every rank
stage: params
step: 2
outliers: 0 1 2
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BURN_IN = 2


class Langevin(torch.optim.Optimizer):
    def __init__(self, parameters, lr, drawn):
        super().__init__(parameters, {"lr": lr})
        self.drawn = drawn
        self.taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / 2)
                if self.taken >= BURN_IN:
                    noise = torch.randn(parameter.shape, generator=self.drawn)
                    parameter.add_(noise, alpha=group["lr"] ** 0.5)
        self.taken += 1


def train():
    rank = dist.get_rank()
    torch.manual_seed(63)
    model = DDP(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    optimizer = Langevin(model.parameters(), 1e-3, torch.Generator().manual_seed(rank))
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
