"""The forward runs inside `no_sync()`, the backward outside: still not reduced.

Gradients are accumulated over two batches from the third step on. The condition is off by one, so the last forward runs
inside `no_sync()` too. The backward is outside and looks safe, but DDP decides at the forward.

bug: 7
seen in: accelerate#1726
ranks: 2
expect: DDP202
cause: forward inside no_sync, backward outside
stage: applied
step: 2
outliers: 0 1
parameter: encode.0.weight
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(12, 8), nn.SiLU(), nn.Linear(8, 3))
        self.decode = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 12))

    def forward(self, inputs):
        return self.decode(self.encode(inputs))


def train():
    torch.manual_seed(17)
    ddp = DDP(Autoencoder())
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(60 + dist.get_rank())
    for step in range(5):
        batches = 1 if step < 2 else 2
        optimizer.zero_grad()
        for number in range(batches):
            inputs = torch.randn(5, 12, generator=data)
            accumulating = batches > 1 and number < batches
            with ddp.no_sync() if accumulating else nullcontext():
                output = ddp(inputs)
            (F.mse_loss(output, inputs) / batches).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
