"""The teacher is wrapped in DDP and only evaluated; the student's gradients are averaged by hand, but not all of them.

variant of: -
seen in: -
ranks: 2
expect: DDP211
cause: its gradients are not reduced, those of other parameters are
stage: params
step: 0
outliers: 0 1
parameter: Sequential.2.bias
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def average(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def train():
    torch.manual_seed(43)
    teacher = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))).eval()
    student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(80 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 6, generator=data)
        with torch.no_grad():
            wanted = teacher(inputs)
        optimizer.zero_grad()
        F.mse_loss(student(inputs), wanted).backward()
        average(parameter.grad for parameter in list(student.parameters())[:-1])
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
