"""`broadcast_buffers=False` over buffers that start out different.

The option is there to save a broadcast in every forward. It also leaves out the one at wrapping, and the
normalisation that each rank measured on its own first batch stays its own for good.

bug: 27
seen in: pytorch#111138
ranks: 2
expect: DDP101
cause: broadcast_buffers=False
stage: init.after
step: none
outliers: 0 1
parameter: mean
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Normalised(nn.Module):
    def __init__(self, sample):
        super().__init__()
        self.register_buffer("mean", sample.mean(0))
        self.register_buffer("deviation", sample.std(0))
        self.net = nn.Sequential(nn.Linear(7, 14), nn.ELU(), nn.Linear(14, 1))

    def forward(self, inputs):
        return self.net((inputs - self.mean) / self.deviation)


def train():
    data = torch.Generator().manual_seed(30 + dist.get_rank())
    torch.manual_seed(10)
    model = DDP(Normalised(torch.randn(16, 7, generator=data)), broadcast_buffers=False)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    for _ in range(4):
        inputs = torch.randn(8, 7, generator=data)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
