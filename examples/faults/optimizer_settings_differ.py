"""The optimizer's settings depend on the rank.

Weight decay comes from a settings file that one machine has an older copy of. Gradients agree at every step,
and the weights drift apart all the same.

bug: 24
seen in: -
ranks: 3
expect: DDP206
cause: weight_decay
stage: params
step: 0
outliers: 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    settings = {"lr": 2e-3, "weight_decay": 0.01 if rank == 1 else 0.1}
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        inputs = torch.randn(8, 10, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :2]).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
