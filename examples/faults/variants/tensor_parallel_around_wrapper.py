"""Tensor parallelism and DDP on a mesh of 2 x 2 ranks, and from step 3 on a forward through `model.module`.

DDP converts the DTensor parameters of its module to local shards. The gradients of these shards are reduced along the
mesh dimension of DDP; without the wrapper's forward they are not.

variant of: forward_around_wrapper
seen in: -
ranks: 4
expect: DDP202
also: DDP202
cause: wrapper bypassed
stage: applied
step: 3
outliers: 0 2
parameter: rises.weight
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.falls = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs):
        return self.norm(self.falls(self.rises(inputs).relu()))


def train():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(31)
    block = parallelize_module(
        Block(), mesh["tensor"], {"rises": ColwiseParallel(), "falls": RowwiseParallel()}
    )
    model = DDP(block, device_mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The ranks of one tensor-parallel group work on the same batch.
    data = torch.Generator().manual_seed(300 + mesh["data"].get_local_rank())
    for step in range(6):
        inputs = torch.randn(4, 8, generator=data)
        network = model if step < 3 else model.module
        optimizer.zero_grad()
        F.mse_loss(network(inputs), inputs.cos()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
