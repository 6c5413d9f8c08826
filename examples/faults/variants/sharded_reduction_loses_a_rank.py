"""A reduce-scatter of the job's own in `fully_shard`: from step 3 on it leaves out what the last rank sends.

It was written to overlap the exchange with the backward, and adds up what has arrived by a time limit. No rank holds a
replica of a shard, so nothing else shows it.

variant of: hook_loses_a_rank
seen in: -
ranks: 3
expect: DDP204
also: DDP606
cause: the sum without rank 2
stage: reduced
step: 3
outliers: 2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


class Exchange:
    """Sends each rank its part of the gradients, and adds up the parts that arrive."""

    def __init__(self) -> None:
        self.step = 0

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
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = list(received.chunk(group.size()))
        if self.step >= 3:
            parts.pop()
        output_tensor.copy_(torch.stack(parts).sum(0) / group.size())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = fully_shard(nn.Sequential(nn.Linear(8, 18), nn.Tanh(), nn.Linear(18, 4)))
    exchange = Exchange()
    model.set_custom_reduce_scatter(exchange)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(70 + dist.get_rank())
    for step in range(6):
        exchange.step = step
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
