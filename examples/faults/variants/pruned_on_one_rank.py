"""The main process prunes the wrapped model in place, the others train on without.

variant of: parameter_replaced
ranks: 2
expect: DDP104
cause: renamed after wrapping on some ranks only
step: 3
outliers: 0
parameter: 2.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        if step == 3 and rank == 0:
            prune.l1_unstructured(model.module[2], "weight", 0.5)
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
