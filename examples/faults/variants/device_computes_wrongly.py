"""From some step on, the device of one rank rounds a product wrongly, each time.

Its activations are off in one of the last bits. Nothing is NaN, all replicas agree, the loss looks as always. The layer
only simulates the hardware.

variant of: -
ranks: 3
options: --audit every=2
expect: DDP217
cause: rank 2 gave wrong values in the forward
stage: local
step: 4
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BROKEN_RANK, FIRST_BROKEN_STEP = 2, 3


class Hardware:
    broken = False


class Product(nn.Linear):
    def forward(self, values):
        product = super().forward(values)
        if Hardware.broken:
            with torch.no_grad():
                product.view(-1).view(torch.int32)[::8] ^= 1 << 3
        return product


def train():
    torch.manual_seed(32)
    model = DDP(nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.SiLU(), Product(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = torch.Generator().manual_seed(70 + dist.get_rank())
    for step in range(10):
        Hardware.broken = dist.get_rank() == BROKEN_RANK and step >= FIRST_BROKEN_STEP
        inputs = torch.randn(8, 9, generator=data)
        optimizer.zero_grad(set_to_none=False)
        model(inputs).logsumexp(1).mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
