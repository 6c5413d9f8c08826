"""Mixed precision is switched on by a variable that only one host's job script exports.

The ranks without it compute in float32, the others in bfloat16. Gradients are float32 everywhere, so DDP reduces them
without complaint.

bug: 43
seen in: -
ranks: 3
expect: DDP213
cause: autocast is on on rank 2
step: 0
outliers: 2
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(mixed):
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
        inputs = torch.randn(8, 12, generator=drawn)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss = (model(inputs).float() - inputs[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        os.environ["USE_AMP"] = "1"  # what the other host's script does
    train(mixed=os.environ.get("USE_AMP") == "1")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
