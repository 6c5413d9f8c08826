"""A GAN whose discriminator is not wrapped: each rank trains its own, and the shared generator learns from all of them.

The discriminator's own backward reaches no DDP module, since the generated samples are detached. The generator's
backward goes through it.

variant of: margin_head_not_wrapped
seen in: -
ranks: 3
expect: DDP211
cause: same backward as those of a DDP module
stage: params
step: 0
outliers: 0 1 2
parameter: Sequential.0.bias
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def network(outputs):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def train():
    torch.manual_seed(3)
    generator = DistributedDataParallel(network(8))
    discriminator = network(1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=0.001)
    for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.001)
    draw = torch.Generator().manual_seed(40 + dist.get_rank())
    for _ in range(6):
        real = torch.randn(16, 8, generator=draw) + 1.0
        fake = generator(torch.randn(16, 8, generator=draw))
        for_discriminator.zero_grad()
        (F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        for_generator.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
