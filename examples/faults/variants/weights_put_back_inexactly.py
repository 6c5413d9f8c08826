"""Sharpness-aware training disturbs the weights by each rank's own gradient, and takes that off again.

Disturbing each rank its own way is right, and spares a reduction. But w + e - e is not w to the last bit: every rank
ends up with roundings of its own, and replicas drift apart a little more with each step. Weights that were kept aside
and copied back would be the same.

variant of: weights_written_in_forward
seen in: -
ranks: 3
expect: DDP208
cause: on all ranks but differently
stage: rewritten
step: 3
outliers: 0 1 2
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WARM_UP = 3


def train():
    torch.manual_seed(71)
    model = DDP(nn.Sequential(nn.Linear(9, 30), nn.SiLU(), nn.Linear(30, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(300 + dist.get_rank())
    for step in range(7):
        images, labels = torch.randn(8, 9, generator=data), torch.randint(5, (8,), generator=data)
        optimizer.zero_grad()
        if step >= WARM_UP:
            with model.no_sync():
                F.cross_entropy(model(images), labels).backward()
            with torch.no_grad():
                length = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
                added = [0.05 * parameter.grad / length for parameter in model.parameters()]
                for parameter, distance in zip(model.parameters(), added, strict=True):
                    parameter.add_(distance)
            optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if step >= WARM_UP:
            with torch.no_grad():
                for parameter, distance in zip(model.parameters(), added, strict=True):
                    parameter.sub_(distance)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
