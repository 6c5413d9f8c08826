"""The loop stays under no_sync and reduces the gradients itself, from step 3 on without the division.

variant of: reduced_by_hand_not_divided
ranks: 3
expect: DDP204
cause: the sum over ranks
stage: applied
step: 3
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(64)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = torch.Generator().manual_seed(440 + dist.get_rank())
    for step in range(8):
        optimizer.zero_grad()
        inputs = torch.randn(8, 6, generator=data)
        with model.no_sync():
            F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if step < 3:
                parameter.grad /= dist.get_world_size()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
