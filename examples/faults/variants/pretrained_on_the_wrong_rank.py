"""Pretrained weights are loaded on rank 1, before wrapping: DDP overwrites them with rank 0's random ones.

variant of: -
seen in: -
ranks: 2
expect: DDP102
severity: note
cause: DDP overwrote them all with rank 0's
stage: init.before
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def pretrained(net):
    stored = torch.Generator().manual_seed(7)
    return {name: torch.randn(value.shape, generator=stored) for name, value in net.state_dict().items()}


def train():
    rank = dist.get_rank()
    torch.manual_seed(61)
    net = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 2))
    if rank == 1:
        net.load_state_dict(pretrained(net))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
