"""FSDP2 trains a head on a frozen encoder outside of it. Rank 2 loaded other weights.

variant of: frozen_backbone_on_rank_0
ranks: 3
also: DDP606
expect: DDP105
cause: never synchronised
step: none
outliers: 2
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def train():
    torch.manual_seed(89)
    encoder = nn.Sequential(nn.Linear(8, 12), nn.Tanh()).requires_grad_(False)
    if dist.get_rank() == 2:
        nn.init.orthogonal_(encoder[0].weight)
    torch.manual_seed(90)
    head = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(head)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(185 + dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(head(encoder(inputs)), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
