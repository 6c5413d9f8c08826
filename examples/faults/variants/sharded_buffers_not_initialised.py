"""FSDP2 on the meta device: weights are initialised after `to_empty`, and the table of positions is not.

The memory holds what it held before: other numbers on each rank. (Here, they are drawn from a seed of the rank.)

variant of: -
ranks: 2
also: DDP606
expect: DDP210
cause: FSDP does not synchronise buffers
stage: init.after
step: none
outliers: 0 1
parameter: positions
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.falls = nn.Linear(16, 8)
        self.register_buffer("positions", torch.arange(8.0).cos(), persistent=False)

    def forward(self, inputs):
        return self.falls(self.rises(inputs + self.positions).relu())

    def init_weights(self):
        for layer in (self.rises, self.falls):
            nn.init.trunc_normal_(layer.weight, std=0.2)
            nn.init.zeros_(layer.bias)


def train():
    with torch.device("meta"):
        model = Encoder()
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(85)
    model.init_weights()
    # What happens to be in the memory.
    model.positions.normal_(generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(182 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs.sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
