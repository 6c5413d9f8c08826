"""All backwards run inside `no_sync`, and one flat buffer is reduced by hand before the step, but not divided.

Replicas stay equal; the learning rate is in effect multiplied by the number of ranks.

variant of: reduced_by_hand_not_divided
seen in: -
ranks: 3
expect: DDP204
cause: not divided by their number
stage: applied
step: 0
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def reduce_gradients(parameters):
    gradients = [parameter.grad for parameter in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


def train():
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    draw = torch.Generator().manual_seed(60 + dist.get_rank())
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            inputs = torch.randn(16, 8, generator=draw)
            labels = torch.randint(0, 4, (16,), generator=draw)
            with model.no_sync():
                (F.cross_entropy(model(inputs), labels) / 2).backward()
        reduce_gradients(list(model.parameters()))
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
