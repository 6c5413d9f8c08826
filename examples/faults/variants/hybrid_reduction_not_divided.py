"""Hybrid sharding with a reduce-scatter of the job's own that sums where FSDP asks for the mean.

The all-reduce along the replicas divides by their number, the reduce-scatter does not divide by that of the shards. All
replicas agree, and the learning rate is in effect twice as high.

variant of: hook_forgets_to_divide
seen in: -
ranks: 4
expect: DDP204
cause: reduce-scatter of the job
stage: reduced
step: 0
outliers: 0 1 2 3
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


class SummedScatter:
    """Ignores the operation that it is given."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(12)
    model = fully_shard(nn.Sequential(nn.Linear(8, 18), nn.Tanh(), nn.Linear(18, 4)), mesh=mesh)
    model.set_custom_reduce_scatter(SummedScatter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(80 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
