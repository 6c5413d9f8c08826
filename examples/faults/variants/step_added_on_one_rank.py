"""One rank steps twice: a warm-up step was left in for rank 0.

variant of: skip_on_out_of_memory
seen in: -
ranks: 2
expect: DDP207
cause: a step was added on rank 0
stage: params
step: 2
outliers: 0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(32)
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    data = torch.Generator().manual_seed(rank)
    for number in range(5):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        nn.functional.l1_loss(model(inputs), inputs).backward()
        optimizer.step()
        if number == 1 and rank == 0:
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
