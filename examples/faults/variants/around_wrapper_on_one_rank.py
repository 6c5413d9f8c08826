"""From some step on, one rank calls `model.module`, and the others wait for its gradients until it has ended.

variant of: forward_around_wrapper
ranks: 2
expect: DDP602
cause: stepped with gradients that DDP did not reduce
step: 3
outliers: 1
exit: fails
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
    for step in range(6):
        optimizer.zero_grad()
        network = model.module if step >= 3 and rank == 1 else model
        network(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
