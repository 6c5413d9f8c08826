"""`DDP(...)` raises, is called again with other arguments, and from step 3 on the wrapper is bypassed.

A script that serves several versions of torch passes an option, and leaves it out where DDP does not know it.

variant of: forward_around_wrapper
seen in: -
ranks: 2
expect: DDP202
cause: wrapper bypassed
stage: applied
step: 3
outliers: 0 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def wrap(network):
    try:
        return DDP(network, overlap_buckets=True)
    except TypeError:
        return DDP(network)


def train():
    torch.manual_seed(17)
    model = wrap(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(90 + dist.get_rank())
    for step in range(6):
        inputs = torch.randn(8, 6, generator=data)
        network = model if step < 3 else model.module
        optimizer.zero_grad()
        F.mse_loss(network(inputs), inputs[:, :2].sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
