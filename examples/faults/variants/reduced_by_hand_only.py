"""No DDP module at all: gradients are averaged by hand, but those of rank 1 are left out from step 3 on.

variant of: -
seen in: -
ranks: 2
expect: DDP202
cause: rank 1 does not apply the reduced gradients
stage: applied
step: 3
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def train():
    torch.manual_seed(47)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(20 + dist.get_rank())
    for step in range(6):
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        F.mse_loss(network(inputs), inputs[:, :3].sin()).backward()
        for parameter in network.parameters():
            reduced = parameter.grad.clone()
            dist.all_reduce(reduced)
            if step < 3 or dist.get_rank() == 0:
                parameter.grad.copy_(reduced / dist.get_world_size())
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
