"""The main process fine-tunes the head with an optimizer of its own, beside the one that all ranks step.

variant of: -
ranks: 2
expect: DDP206
cause: a second optimizer
stage: params
step: 4
outliers: 0
parameter: 2.*
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    extra = torch.optim.SGD(model.module[2].parameters(), lr=0.01) if rank == 0 else None
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
        if extra is not None and step == 3:
            extra.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
