"""Gradients from `torch.autograd.grad`, set by hand: DDP reduces only what `backward()` computes.

From step 2 on the loop asks for gradients with `autograd.grad`, to look at them before they are used, and puts them
into `.grad` itself. DDP's hooks do not fire on this way.

bug: 11
seen in: pytorch#47562
ranks: 2
expect: DDP202
cause: gradients set without a backward
stage: applied
step: 2
outliers: 0 1
parameter: first.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Bilinear(4, 3, 10)
        self.second = nn.Linear(10, 1)

    def forward(self, left, right):
        return self.second(torch.tanh(self.first(left, right))).squeeze(-1)


def train():
    torch.manual_seed(31)
    ddp = DDP(Regressor())
    parameters = list(ddp.parameters())
    optimizer = torch.optim.Adamax(parameters, lr=1e-2)
    data = torch.Generator().manual_seed(110 + dist.get_rank())
    for step in range(5):
        left, right = torch.randn(8, 4, generator=data), torch.randn(8, 3, generator=data)
        optimizer.zero_grad()
        loss = F.huber_loss(ddp(left, right), left.sum(1))
        if step < 2:
            loss.backward()
        else:
            gradients = torch.autograd.grad(loss, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clamp(-1, 1)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
