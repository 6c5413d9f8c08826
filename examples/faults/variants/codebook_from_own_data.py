"""A codebook that each rank updates from its own batch, with buffer broadcasting switched off.

Ranks quantise to codes of their own after a while, and the checkpoint holds those of one rank.

variant of: -
seen in: -
ranks: 2
expect: DDP210
cause: broadcast_buffers=False, and buffers that each rank updates from its own data
stage: buffers.end
step: none
outliers: 0 1
parameter: codes
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.norm, self.decoder = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(12, 4))

    def forward(self, inputs):
        latent = self.norm(self.encoder(inputs))
        nearest = torch.cdist(latent, self.codes).argmin(1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            # The sums should go through an all_reduce first.
            hot = F.one_hot(nearest, len(self.codes)).float()
            means = hot.T @ latent / hot.sum(0).clamp(min=1)[:, None]
            self.codes.copy_(torch.where(hot.sum(0)[:, None] > 0, self.codes.lerp(means, 0.1), self.codes))
        return self.decoder(latent + (chosen - latent).detach()), F.mse_loss(latent, chosen.detach())


def train():
    torch.manual_seed(77)
    model = DDP(Quantiser(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(600 + dist.get_rank())
    for _ in range(5):
        inputs = torch.randn(16, 8, generator=data)
        outputs, distance = model(inputs)
        optimizer.zero_grad()
        (F.mse_loss(outputs, inputs) + distance).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
