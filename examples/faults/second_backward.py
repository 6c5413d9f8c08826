"""Two backwards on one forward: the second is added to reduced gradients and stays local.

Two tasks share a trunk. From step 1 on each task's loss is sent backward by itself, with `retain_graph=True` for the
first. DDP reduces one backward for each forward.

bug: 10
seen in: pytorch#59359
ranks: 2
expect: DDP202
cause: second backward on one forward
stage: applied
step: 1
outliers: 0 1
parameter: trunk.weight_ih
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.GRUCell(7, 14)
        self.heads = nn.Linear(14, 2)

    def forward(self, inputs):
        hidden = None
        for moment in inputs.unbind(1):
            hidden = self.trunk(moment, hidden)
        return self.heads(hidden).unbind(-1)


def train():
    torch.manual_seed(29)
    ddp = DDP(TwoTasks())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=1e-4)
    data = torch.Generator().manual_seed(90 + dist.get_rank())
    for step in range(4):
        inputs, wanted = torch.randn(5, 4, 7, generator=data), torch.randn(2, 5, generator=data)
        optimizer.zero_grad()
        first, second = (F.mse_loss(output, want) for output, want in zip(ddp(inputs), wanted, strict=True))
        if step == 0:
            (first + second).backward()
        else:
            first.backward(retain_graph=True)
            second.backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
