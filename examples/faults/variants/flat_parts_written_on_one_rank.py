"""Sharded optimizer state by hand: from step 3 on, one rank writes to the model after the parts were gathered.

The optimizer of each rank steps a part of a flat copy, so no optimizer holds the parameters of the model. Rank 1 rounds
its weights for an export, in place.

variant of: weights_restored_on_one_rank
seen in: -
ranks: 2
expect: DDP211
cause: a part of a copy
stage: params
step: 4
outliers: 0 1
parameter: Sequential.*
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    share = -(-total // size)

    def own_part(tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = functional.pad(
            torch.cat([tensor.reshape(-1) for tensor in tensors]), (0, share * size - total)
        )
        return flat[rank * share : (rank + 1) * share].clone()

    part = nn.Parameter(own_part([parameter.detach() for parameter in parameters]))
    optimizer = torch.optim.AdamW([part], 1e-2)
    data = torch.Generator().manual_seed(900 + rank)
    for step in range(8):
        inputs = torch.randn(8, 8, generator=data)
        model.zero_grad()
        functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        part.grad = own_part([parameter.grad for parameter in parameters])
        optimizer.step()
        parts = [torch.empty(share) for _ in range(size)]
        dist.all_gather(parts, part.detach())
        nn.utils.vector_to_parameters(torch.cat(parts)[:total], parameters)
        if rank == 1 and step >= 3:
            for parameter in parameters:
                parameter.data = parameter.data.bfloat16().float()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
