"""With `torch.set_default_device`: one rank's device gives a wrong gradient at one step.

The forward makes a tensor without saying where: it is on the default device, also when another rank computes it again.
The layer only simulates the hardware.

variant of: gradient_bit_flipped
ranks: 3
options: --audit every=2
expect: DDP217
cause: rank 2 gave wrong values in the backward
stage: local
step: 4
outliers: 2
parameter: embed.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BROKEN_RANK, BROKEN_STEP = 2, 4


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
            gradient.view(-1)[3] *= 16
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 10, bias=False)
        self.head = nn.Linear(10, 3)

    def forward(self, values):
        positions = torch.linspace(0.5, 1.5, values.shape[1])
        return self.head(Corrupted.apply(self.embed(values * positions)).tanh())


def train():
    torch.manual_seed(33)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(600 + dist.get_rank())
    for step in range(8):
        Hardware.due = dist.get_rank() == BROKEN_RANK and step == BROKEN_STEP
        inputs, targets = torch.randn(6, 7), torch.randint(3, (6,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    # The device that it is anyway: what matters is that there is a default.
    torch.set_default_device(torch.empty(0).device)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
