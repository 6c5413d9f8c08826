"""A rank leaves out the step of a batch whose loss is far above its own average.

variant of: skip_on_nan
seen in: -
ranks: 3
launcher: torchrun
expect: DDP207
cause: a step was skipped on rank 0
stage: params
step: 4
outliers: 0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(33)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)), static_graph=True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    usual = None
    for number in range(8):
        inputs = torch.randn(8, 4, generator=data) * (30.0 if (number, rank) == (4, 0) else 1.0)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if usual is not None and loss.item() > 10 * usual:
            continue
        usual = loss.item() if usual is None else 0.9 * usual + 0.1 * loss.item()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
