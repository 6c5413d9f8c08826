"""Weights are updated inside `forward` from the rank's own activations.

A Hebbian layer learns while it computes: each forward adds the outer product of what came in and what went out. No
gradient and no reduction take part, and every rank learns from its own batch.

bug: 19
seen in: PC-Transformers#135
ranks: 2
expect: DDP208
cause: written inside the forward
stage: rewritten
step: 2
outliers: 0 1
parameter: memory.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Hebbian(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width, bias=False)
        self.requires_grad_(False)
        self.seen = 0

    def forward(self, inputs):
        output = torch.tanh(super().forward(inputs))
        self.seen += 1
        if self.training and self.seen > 2:
            self.weight.data += 0.01 * (output.T @ inputs).detach() / len(inputs)
        return output


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(6, 9)
        self.memory = Hebbian(9)
        self.write = nn.Linear(9, 6)

    def forward(self, inputs):
        return self.write(self.memory(self.read(inputs)))


def train():
    torch.manual_seed(67)
    ddp = DDP(Remembering())
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    data = torch.Generator().manual_seed(190 + dist.get_rank())
    for _ in range(5):
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), inputs).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
