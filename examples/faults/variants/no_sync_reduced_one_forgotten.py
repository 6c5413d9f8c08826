"""The loop stays under no_sync and averages the gradients itself, but only those of the matrices.

The helper was written for a model without biases. Every rank applies its own gradients to the biases.

variant of: reduced_by_hand_one_forgotten
ranks: 2
expect: DDP202
cause: 0.bias, 2.bias left out of a reduction by hand
stage: applied
step: 0
outliers: 0 1
parameter: 0.bias
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector


def average_gradients(matrices):
    flat = parameters_to_vector([parameter.grad for parameter in matrices])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in zip(matrices, flat.split([p.numel() for p in matrices]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def train():
    torch.manual_seed(62)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(420 + dist.get_rank())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    for _ in range(5):
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(2):
                inputs = torch.randn(8, 6, generator=data)
                (F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)) / 2).backward()
        average_gradients(matrices)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
