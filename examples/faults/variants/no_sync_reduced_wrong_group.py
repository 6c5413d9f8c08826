"""The loop stays under no_sync and averages the gradients itself, from step 2 on over the group of the node.

The first all_reduce of a hierarchical reduction stayed, the one between the nodes was commented out.

variant of: reduced_by_hand_wrong_group
ranks: 4
expect: DDP202
cause: reduced within ranks 0-1 and within ranks 2-3, not over all ranks
stage: applied
step: 2
outliers: 0 1 2 3
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(63)
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rails = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    node, rail = nodes[dist.get_rank() // 2], rails[dist.get_rank() % 2]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(430 + dist.get_rank())
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(8, 6, generator=data)
        with model.no_sync():
            F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=node)
            parameter.grad /= 2
            if step < 2:
                dist.all_reduce(parameter.grad, group=rail)
                parameter.grad /= 2
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
