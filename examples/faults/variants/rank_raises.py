"""One of two ranks meets a bad sample and raises; the other loses its partner and fails too.

variant of: rank_killed
seen in: -
ranks: 2
launcher: torchrun
expect: DDP602
cause: ValueError: bad sample
stage: params
step: 2
outliers: 0
exit: fails
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def load(step, data):
    if step == 3 and dist.get_rank() == 0:
        raise ValueError("bad sample")
    return torch.randn(4, 6, generator=data)


def train():
    torch.manual_seed(48)
    model = DDP(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        inputs = load(step, data)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
