"""One rank finds a saved adapter and loads it; DDP ignores the adapter and does not broadcast it.

variant of: ignored_adapter
seen in: OneTrainer#803
ranks: 3
expect: DDP101
cause: configured to ignore
stage: init.after
step: none
outliers: 1
parameter: adapter.bias
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.GRU(5, 8, batch_first=True)
        self.adapter = nn.Linear(8, 8)

    def forward(self, series):
        hidden, _ = self.base(series)
        return hidden + self.adapter(hidden)


def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def train():
    rank = dist.get_rank()
    torch.manual_seed(22)
    model = Adapted()
    if rank == 1:  # the file is on this node only
        torch.manual_seed(1)
        model.adapter.load_state_dict(nn.Linear(8, 8).state_dict())
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["adapter.weight", "adapter.bias"])
    ddp = DDP(model)
    optimizer = torch.optim.Adamax(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(110 + rank)
    for _ in range(4):
        series = torch.randn(3, 6, 5, generator=data)
        optimizer.zero_grad()
        ddp(series).square().mean().backward()
        average(model.adapter.parameters())
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
