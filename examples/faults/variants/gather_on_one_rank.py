"""The main process gathers metrics every few steps; the other ranks do not take part.

variant of: barrier_on_some_ranks
ranks: 2
expect: DDP603
cause: rank 0 calls all_gather
stage: reduced
step: 3
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
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 2 and rank == 0:
            losses = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(losses, loss.detach().reshape(1))
            print(torch.stack(losses).mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
