"""A frozen target network follows statistics of the rank's own data.

The target is part of the wrapped model, needs no gradient and is written by hand every second step. The rate at which
it follows depends on this rank's own returns, so each rank aims at another target.

bug: 18
seen in: alf#1475
ranks: 2
expect: DDP208
cause: between two steps, on all ranks but differently
stage: rewritten
step: 2
outliers: 0 1
parameter: target.0.weight
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, states, next_states):
        return self.online(states), self.target(next_states)

    @torch.no_grad()
    def follow(self, returns):
        rate = 0.1 * torch.sigmoid(returns.mean())
        for aim, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
            aim.lerp_(new, rate.item())


def train():
    torch.manual_seed(61)
    ddp = DDP(Critic())
    optimizer = torch.optim.Adam(ddp.module.online.parameters(), lr=5e-3)
    data = torch.Generator().manual_seed(180 + dist.get_rank())
    for step in range(6):
        states, next_states = torch.randn(2, 8, 4, generator=data)
        returns = torch.randn(8, generator=data)
        optimizer.zero_grad()
        values, later = ddp(states, next_states)
        F.smooth_l1_loss(values.amax(1), returns + 0.9 * later.amax(1)).backward()
        optimizer.step()
        if step % 2 == 1:
            ddp.module.follow(returns)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
