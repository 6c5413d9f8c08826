"""A model that `fully_shard` (FSDP2) shards: nothing is compared, and the report must not say that replicas agree.

variant of: -
seen in: -
ranks: 2
expect: DDP606
cause: FSDP2
step: none
outliers: 0 1
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def train():
    torch.manual_seed(53)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(network, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
