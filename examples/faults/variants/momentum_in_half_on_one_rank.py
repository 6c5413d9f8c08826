"""An optimizer that keeps its momentum in half precision where it thinks that the machine is short of memory.

variant of: -
seen in: -
ranks: 2
launcher: environment
expect: DDP201
cause: the update itself was not the same on every rank
stage: params
step: 1
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ThriftySGD(torch.optim.Optimizer):
    def __init__(self, parameters, lr, short_of_memory):
        super().__init__(parameters, {"lr": lr})
        self.kept = torch.bfloat16 if short_of_memory else torch.float32
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                before = self.momentum.get(parameter, torch.zeros_like(parameter)).to(parameter.dtype)
                now = before.mul_(0.9).add_(parameter.grad)
                parameter.add_(now, alpha=-group["lr"])
                self.momentum[parameter] = now.to(self.kept)


def train():
    rank = dist.get_rank()
    torch.manual_seed(64)
    model = DDP(nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)))
    optimizer = ThriftySGD(model.parameters(), 0.05, short_of_memory=rank == 1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 1, 8, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
