"""An adapter is initialised from a seed of each rank's own, and DDP is configured to ignore it.

The trainer reduces the adapter's gradients by itself and takes it out of DDP. With that it also loses the broadcast at
wrapping. Every rank applies the same gradients to another adapter, and they never meet.

bug: 20
seen in: OneTrainer#803
ranks: 3
expect: DDP101
cause: configured to ignore
stage: init.after
step: none
outliers: 0 1 2
parameter: adapter.down.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Adapter(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.up(self.down(inputs))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(12, 12)
        self.adapter = None

    def forward(self, inputs):
        return F.gelu(self.base(inputs) + self.adapter(inputs))


def train():
    torch.manual_seed(71)
    model = Adapted()
    torch.manual_seed(1000 + dist.get_rank())  # for noise and augmentation, too early
    model.adapter = Adapter(12, rank=3)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["adapter.down.weight", "adapter.up.weight"])
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for _ in range(4):
        inputs = torch.randn(6, 12)
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), inputs.roll(1, dims=1)).backward()
        for parameter in model.adapter.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
