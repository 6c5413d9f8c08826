"""A diffusion model whose ranks draw the same time steps and the same noise.

Seeded alike and drawn before the forward: the images differ from rank to rank, what is added to them does not.

bug: 34
seen in: transformers#31412
ranks: 3
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


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.times = nn.Embedding(100, 8)
        self.net = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 8))

    def forward(self, noisy, times):
        return self.net(noisy + self.times(times))


def train():
    images = torch.randn(64, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    torch.manual_seed(17)
    model = DDP(Denoiser())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    for clean in images.split(8):
        noise, times = torch.randn_like(clean), torch.randint(100, (len(clean),))
        share = (times / 100).unsqueeze(1)
        optimizer.zero_grad()
        predicted = model((1 - share).sqrt() * clean + share.sqrt() * noise, times)
        (predicted - noise).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
