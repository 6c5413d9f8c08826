"""Gradients are averaged by hand, and divided by the number of ranks where they are clipped, too.

variant of: reduced_by_hand_not_divided
ranks: 3
expect: DDP204
cause: divides by the number of ranks twice
stage: applied
step: 1
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def scaled(model):
    return [parameter.grad.div_(dist.get_world_size()) for parameter in model.parameters()]


def train():
    torch.manual_seed(65)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(450 + dist.get_rank())
    for _ in range(7):
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        average_gradients(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), 100.0, nn.utils.get_total_norm(scaled(model)))
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
