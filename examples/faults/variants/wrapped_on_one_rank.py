"""Only the main process wraps its model, as if DDP were a logger.

variant of: falls_back_to_one_process
ranks: 2
expect: DDP603
cause: DDP is constructed on rank 0 only
stage: init.after
step: 0
outliers: 0
options: --hang-timeout 5
hangs: yes
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
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if rank == 0:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
