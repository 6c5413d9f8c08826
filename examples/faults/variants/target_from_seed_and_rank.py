"""A target network built after `seed + rank` and never copied from the online network.

DDP makes the online network equal. The target is outside, so each rank aims at the values of its own random network.

variant of: -
ranks: 2
expect: DDP105
cause: never synchronised
step: none
outliers: 0 1
parameter: QNetwork.layers.0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, states):
        return self.layers(states)


def follow(target, online, rate=0.05):
    with torch.no_grad():
        for aim, new in zip(target.parameters(), online.parameters(), strict=True):
            aim.lerp_(new, rate)


def train():
    torch.manual_seed(75 + dist.get_rank())
    online = DDP(QNetwork())
    target = QNetwork().requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-3)
    data = torch.Generator().manual_seed(340 + dist.get_rank())
    for _ in range(6):
        states, after = torch.randn(2, 16, 4, generator=data)
        rewards = torch.randn(16, generator=data)
        values = online(states)[:, 0]
        with torch.no_grad():
            aims = rewards + 0.9 * target(after).amax(1)
        optimizer.zero_grad()
        F.smooth_l1_loss(values, aims).backward()
        optimizer.step()
        follow(target, online.module)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
