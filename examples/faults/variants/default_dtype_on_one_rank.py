"""One rank's start-up file sets the default dtype to float64: it sums its features in another precision.

variant of: autocast_on_one_rank
seen in: -
ranks: 3
expect: DDP213
cause: default dtype differs: float32 on ranks 0 and 2; float64 on rank 1
step: 0
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Positions(nn.Module):
    """Adds the position of each token: computed in the default dtype."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float32)

    def forward(self, inputs):
        positions = torch.arange(8) / torch.tensor(3.0)
        return self.layer((inputs + positions.sin()).to(self.layer.weight.dtype))


def train():
    rank = dist.get_rank()
    torch.manual_seed(61)
    model = DDP(Positions())
    if rank == 1:
        torch.set_default_dtype(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
        inputs = torch.randn(6, 8, generator=drawn, dtype=torch.float32)
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
