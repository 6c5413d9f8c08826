"""One of three ranks may not write a single byte to any file; all train on, two of them are watched.

variant of: -
seen in: -
ranks: 3
launcher: environment
expect: DDP605
cause: rank 2 could not write any record
step: none
outliers: 2
"""

import os
import resource

import torch
import torch._dynamo  # DDP imports it, and it tries out the folder for temporary files: that has to be over by then
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    torch.manual_seed(72)
    model = DDP(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(5, 3, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    if os.environ["RANK"] == "2":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
