"""Rank 0 loads pretrained weights before wrapping, and `init_sync=False` keeps them to itself.

variant of: init_sync_off
seen in: -
ranks: 2
expect: DDP101
cause: init_sync=False
stage: init.after
step: none
outliers: 0 1
parameter: 0.weight
torch: 2.8
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def pretrained():
    numbers = torch.Generator().manual_seed(99)
    return {"0.weight": torch.randn(4, 1, 3, generator=numbers), "0.bias": torch.zeros(4)}


def train():
    rank = dist.get_rank()
    torch.manual_seed(39)
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    if rank == 0:
        net.load_state_dict(pretrained(), strict=False)
    model = DDP(net, init_sync=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 1, 8, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
