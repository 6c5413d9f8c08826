"""`find_unused_parameters=True` to be safe, and every parameter takes part in every backward.

The result is right. DDP walks through the graph of every forward and reduces a list of what was used.

bug: 57
seen in: -
ranks: 2
expect: DDP407
severity: note
cause: find_unused_parameters=True
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    blocks = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
    model = DDP(nn.Sequential(*blocks, nn.Linear(32, 4)), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        inputs = torch.randn(8, 32, generator=drawn)
        (model(inputs) - inputs[:, :4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
