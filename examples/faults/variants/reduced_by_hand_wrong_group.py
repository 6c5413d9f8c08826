"""Gradients averaged by hand in a flat buffer, over the group of the node instead of all ranks.

From step 2 on the loop passes the wrong group. Within a pair the ranks agree, the pairs do not.

variant of: -
ranks: 4
expect: DDP202
cause: ranks 0-1
stage: applied
step: 2
outliers: 0 1 2 3
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector


def average_gradients(model, group):
    parameters = list(model.parameters())
    flat = parameters_to_vector([parameter.grad for parameter in parameters])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def train():
    torch.manual_seed(77)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[dist.get_rank() // 2]
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(360 + dist.get_rank())
    for step in range(6):
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        average_gradients(model, dist.group.WORLD if step < 2 else own)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
