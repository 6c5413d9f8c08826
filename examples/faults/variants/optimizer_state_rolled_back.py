"""One rank puts an older optimizer state back in the middle of training.

A guard against bad batches keeps a copy of the momentum and restores it where the loss jumps. Only one rank saw the
jump.

variant of: optimizer_state_on_rank_0
seen in: -
ranks: 2
expect: DDP206
cause: optimizer state was loaded on rank 1 only
stage: params
step: 4
outliers: 0 1
parameter: 0.weight
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(14)
    ddp = DDP(nn.Sequential(nn.Linear(5, 9), nn.Sigmoid(), nn.Linear(9, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    data = torch.Generator().manual_seed(70 + rank)
    kept = None
    for step in range(6):
        inputs = torch.randn(6, 5, generator=data)
        if step == 3 and rank == 1:
            inputs = inputs * 30
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(inputs).squeeze(-1), inputs.sum(1))
        loss.backward()
        optimizer.step()
        if loss.item() < 100:
            kept = copy.deepcopy(optimizer.state_dict())
        else:
            optimizer.load_state_dict(kept)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
