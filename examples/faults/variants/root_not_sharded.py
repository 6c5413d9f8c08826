"""`fully_shard` is applied to the layers and not to the root: what the root itself holds stays as it is, and unreduced.

variant of: loss_weights_not_wrapped
seen in: -
ranks: 2
expect: DDP211
cause: a root that was not wrapped
stage: params
step: 0
outliers: 0 1
parameter: Network.scale
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
    model = Network()
    for layer in (model.rises, model.falls):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs.sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
