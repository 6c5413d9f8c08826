"""Buffers registered in the order of a set: DDP copies each to another name on the other ranks.

The tables have the same shape, so the copy at the start of every forward swaps them silently. Parameters are
in order, and so are the gradients' names.

bug: 25
seen in: transformers#48162
ranks: 2
launcher: torchrun
expect: DDP210
cause: buffers mapped to different names
stage: init.before
step: none
outliers: 0 1
parameter: frequencies_*
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BANDS = {
    "bass": 1.0,
    "mid": 2.0,
    "treble": 4.0,
    "voice": 3.0,
    "noise": 9.0,
    "hum": 0.5,
    "hiss": 7.0,
    "air": 6.0,
}


class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        for band in set(BANDS):
            self.register_buffer(f"frequencies_{band}", torch.linspace(0, BANDS[band], 8))
        self.mix = nn.Linear(8, 1)

    def forward(self, sound):
        total = sum(torch.sin(sound * getattr(self, f"frequencies_{band}")) for band in sorted(BANDS))
        return self.mix(total)


def train():
    torch.manual_seed(8)
    model = DDP(Filters())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        sound = torch.randn(6, 8, generator=data)
        optimizer.zero_grad()
        model(sound).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
