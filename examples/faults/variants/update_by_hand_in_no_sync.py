"""Plain gradient descent by hand, in a loop that never leaves `no_sync()`.

variant of: update_by_hand
seen in: -
ranks: 3
expect: DDP208
cause: from gradients that DDP did not reduce: no_sync open
stage: params
step: 2
outliers: 0 1 2
parameter: weight
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    torch.manual_seed(16)
    model = nn.Linear(7, 2)
    ddp = DDP(model)
    data = torch.Generator().manual_seed(80 + dist.get_rank())
    for step in range(5):
        inputs = torch.randn(9, 7, generator=data)
        ddp.zero_grad()
        with ddp.no_sync() if step >= 2 else nullcontext():
            ddp(inputs).sub(inputs[:, :2]).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
