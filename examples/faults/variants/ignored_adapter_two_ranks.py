"""Two ranks, two adapters: each is drawn after the ranks took seeds of their own.

variant of: ignored_adapter
seen in: OneTrainer#803
ranks: 2
expect: DDP101
cause: configured to ignore
stage: init.after
step: none
outliers: 0 1
parameter: lora.0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora = nn.ParameterList([torch.randn(2, 10) * 0.1, torch.zeros(10, 2)])

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.lora[0].T @ self.lora[1].T


def train():
    torch.manual_seed(24)
    base = nn.Linear(10, 10)
    torch.manual_seed(dist.get_rank())
    model = LowRank(base)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["lora.0", "lora.1"])
    ddp = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(4):
        inputs = torch.randn(6, 10)
        optimizer.zero_grad()
        F.l1_loss(ddp(inputs), inputs.flip(1)).backward()
        for parameter in model.lora:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
