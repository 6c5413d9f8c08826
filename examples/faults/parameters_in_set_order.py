"""Parameters built in the order of a set, which Python shuffles in every process.

The experts all have the same shape, so DDP pairs the wrong ones without a word: it sends rank 0's weights to
the others by position, and averages gradients of different experts.

bug: 25
seen in: transformers#48162
ranks: 2
launcher: torchrun
expect: DDP103
cause: the same names in another order
stage: init.before
step: none
outliers: 0 1
parameter: experts.*
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LANGUAGES = {"de", "en", "es", "fi", "fr", "it", "ja", "ko", "nl", "pl", "pt", "sv", "tr", "zh"}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(5, 5) for name in LANGUAGES})

    def forward(self, inputs):
        return sum(self.experts[name](inputs) * (n + 1) for n, name in enumerate(sorted(LANGUAGES)))


def train():
    torch.manual_seed(7)
    model = DDP(Experts())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(6, 5, generator=data)
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(model(inputs), inputs.flip(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
