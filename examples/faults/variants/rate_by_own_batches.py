"""The learning rate follows a count that each rank keeps for itself.

Batches with too little in them are left out of the count, and one rank gets such a batch.

variant of: plateau_per_rank
seen in: -
ranks: 2
expect: DDP206
cause: hyperparameters differ: lr
stage: params
step: 3
outliers: 0 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(26)
    ddp = DDP(nn.Sequential(nn.Linear(6, 12), nn.CELU(), nn.Linear(12, 6)), static_graph=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda seen: 1 / (1 + seen))
    data = torch.Generator().manual_seed(120 + rank)
    for step in range(5):
        inputs = torch.randn(4, 6, generator=data)
        if step == 2 and rank == 1:
            inputs[1:] = 0
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), inputs).backward()
        optimizer.step()
        if inputs.count_nonzero() > 12:
            scheduler.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
