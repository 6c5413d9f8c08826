"""A variational autoencoder whose ranks draw the same noise for their latent variables.

variant of: same_dropout_masks
seen in: -
ranks: 3
launcher: torchrun
expect: DDP306
cause: seeded its generator with the same number
stage: forward
step: 0
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(10, 6)
        self.decode = nn.Linear(3, 10)

    def forward(self, inputs):
        mean, spread = self.encode(inputs).chunk(2, dim=1)
        return self.decode(mean + spread.exp() * torch.randn_like(mean)), mean, spread


def train():
    data = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(44)
    model = DDP(Autoencoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        inputs = torch.randn(6, 10, generator=data)
        output, mean, spread = model(inputs)
        loss = (output - inputs).square().mean() + (mean.square() + spread.exp() - spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
