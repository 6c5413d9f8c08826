"""FSDP2 on a mesh of 2 replicas: from step 3 on `set_requires_gradient_sync(False)` stays in effect.

FSDP keeps each rank's gradients unsharded, and the optimizer finds none. Nothing is trained any more.

variant of: no_sync_never_left
seen in: -
ranks: 2
expect: DDP212
cause: set_requires_gradient_sync(False)
step: 3
outliers: 0 1
parameter: falls.bias
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.falls = nn.Linear(16, 8)

    def forward(self, inputs):
        return self.falls(self.rises(inputs).tanh() * self.scale)


def train():
    torch.manual_seed(53)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(Network(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        if step == 3:
            model.set_requires_gradient_sync(False)
        F.mse_loss(model(inputs), inputs.sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
