"""One rank allows reduced precision in matrix products: its configuration file is older.

variant of: autocast_on_one_rank
seen in: -
ranks: 3
expect: DDP213
cause: float32 matmul precision
step: 0
outliers: 0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.set_float32_matmul_precision("medium" if rank == 0 else "highest")
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(5):
        inputs = torch.randn(8, 12, generator=drawn)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
