"""A hand-written update from gradients that were not reduced.

The loop needs no optimizer: it takes gradients with `autograd.grad` and writes the new weights itself, as in
meta-learning. No reduction takes part, and the ranks part with the first update.

bug: 12
seen in: -
ranks: 2
expect: DDP208
cause: from gradients that DDP did not reduce: no backward() ran before the update
stage: params
step: 0
outliers: 0 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

RATE = 0.05


def train():
    torch.manual_seed(37)
    ddp = DDP(nn.Sequential(nn.Linear(5, 16), nn.Softplus(), nn.Linear(16, 2)))
    parameters = list(ddp.parameters())
    data = torch.Generator().manual_seed(120 + dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(10, 5, generator=data)
        loss = F.mse_loss(ddp(inputs), inputs[:, :2])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= RATE * gradient


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
