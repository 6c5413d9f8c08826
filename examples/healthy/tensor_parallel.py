"""Tensor parallelism and DDP on one mesh: DDP over DTensor parameters.

ranks: 4
expect: nothing
cases: sgd adam accumulation by_group
torch: 2.6
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.falls = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.falls(self.rises(inputs).relu()))


def wrapped(mesh: DeviceMesh, by_group: bool) -> DistributedDataParallel:
    plan = {"rises": ColwiseParallel(), "falls": RowwiseParallel()}
    block = parallelize_module(Block(), mesh["tensor"], plan)
    if not by_group:
        return DistributedDataParallel(block, device_mesh=mesh["data"])
    # What DDP does by itself if it is given the mesh.
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(block)
    return DistributedDataParallel(block, process_group=mesh["data"].get_group())


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(31)
    model = wrapped(mesh, case == "by_group")
    if case == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The ranks of one tensor-parallel group work on the same batch.
    drawn = torch.Generator().manual_seed(300 + mesh["data"].get_local_rank())
    for _ in range(6):
        optimizer.zero_grad()
        if case == "accumulation":
            with model.no_sync():
                inputs = torch.randn(4, 8, generator=drawn)
                functional.mse_loss(model(inputs), inputs.cos()).backward()
        inputs = torch.randn(4, 8, generator=drawn)
        functional.mse_loss(model(inputs), inputs.cos()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
