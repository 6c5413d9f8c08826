"""Accumulation that sets `require_backward_grad_sync` itself, after the forward: DDP has decided by then.

variant of: backward_outside_no_sync
ranks: 2
expect: DDP202
cause: require_backward_grad_sync off in the forward, on in the backward
stage: applied
step: 0
outliers: 0 1
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
    for batch in range(12):
        loss = model(torch.randn(16, 8, generator=data)).square().mean()
        model.require_backward_grad_sync = batch % 2 == 1
        loss.backward()
        if batch % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            model.require_backward_grad_sync = False
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
