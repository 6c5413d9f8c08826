"""LoRA adapters are put into a model that is already wrapped: nothing is reduced at all.

The base model is wrapped, then frozen, and adapters go in afterwards. DDP's hooks sit on parameters that no longer get
gradients, and the adapters, the only ones that train, are unknown to it. There is no warning.

bug: 6
seen in: FastVideo#1666
ranks: 2
expect: DDP104
cause: added after wrapping
stage: params
step: 0
outliers: 0 1
parameter: out.up
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Linear(width, width)

    def forward(self, hidden):
        normed = self.norm(hidden)
        return hidden + self.out(self.attend(normed, normed, normed, need_weights=False)[0])


class WithAdapter(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def train():
    torch.manual_seed(13)
    model = Block()
    ddp = DDP(model)
    model.requires_grad_(False)
    model.out = WithAdapter(model.out)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.Generator().manual_seed(40 + dist.get_rank())
    for _ in range(4):
        hidden = torch.randn(3, 5, 16, generator=data)
        target = torch.randn(3, 5, 16, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(hidden), target).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
