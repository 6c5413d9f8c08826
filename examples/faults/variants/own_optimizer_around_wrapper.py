"""An optimizer that is none of torch's, and from the second phase on a forward through `model.module`.

variant of: update_by_hand
seen in: -
ranks: 3
expect: DDP208
cause: from gradients that DDP did not reduce: wrapper bypassed
stage: params
step: 3
outliers: 0 1 2
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class SignDescent:
    """A few lines from a paper: no subclass of torch.optim.Optimizer."""

    def __init__(self, parameters, rate):
        self.parameters, self.rate = list(parameters), rate

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        for parameter in self.parameters:
            parameter.data -= self.rate * parameter.grad.sign()


def train():
    torch.manual_seed(72)
    model = DDP(nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = SignDescent(model.parameters(), rate=1e-3)
    data = torch.Generator().manual_seed(400 + dist.get_rank())
    for step in range(7):
        inputs = torch.randn(10, 7, generator=data)
        network = model if step < 3 else model.module
        optimizer.zero_grad()
        F.mse_loss(network(inputs), inputs[:, :1].sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
