"""A layer is skipped in the middle of training: the harm is done one step before the error.

Layer drop leaves out the same block on every rank. DDP waits for its gradients, the step applies local ones, and the
next forward raises.

variant of: unused_parameter
seen in: pytorch#112152
ranks: 3
expect: DDP202
cause: no gradient arrived for blocks.1.weight, blocks.1.bias
stage: applied
step: 2
outliers: 0 1 2
parameter: blocks.1.weight
exit: fails
also: DDP602
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, hidden, dropped):
        for number, block in enumerate(self.blocks):
            if number not in dropped:
                hidden = hidden + torch.tanh(block(hidden))
        return hidden


def train():
    torch.manual_seed(12)
    ddp = DDP(LayerDrop())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(60 + dist.get_rank())
    for step in range(5):
        hidden = torch.randn(4, 10, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(hidden, {1} if step == 2 else set()), hidden.flip(0)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
