"""Plain gradient descent by hand, after a backward that went around the wrapper.

variant of: update_by_hand
seen in: -
ranks: 3
expect: DDP208
cause: from gradients that DDP did not reduce: wrapper bypassed
stage: params
step: 2
odd ranks: 0 1 2
parameter: weight
"""

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
        with torch.no_grad():
            before = ddp(inputs).abs().mean()
        ddp.zero_grad()
        loss = (model if step >= 2 else ddp)(inputs).sub(inputs[:, :2]).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad / (1 + 0 * before)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
