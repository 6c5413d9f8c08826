"""A model in `fully_shard`: rank 1 leaves out its step 4, since the loss of its own batch is too high.

variant of: skip_on_nan
seen in: -
ranks: 2
expect: DDP207
also: DDP606
cause: more steps
step: none
outliers: 0 1
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.falls = nn.Linear(16, 8)

    def forward(self, inputs):
        return self.falls(self.rises(inputs).tanh() * self.scale)


def train():
    torch.manual_seed(53)
    model = fully_shard(Network(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs.sin()).backward()
        if step != 4 or dist.get_rank() != 1:
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
