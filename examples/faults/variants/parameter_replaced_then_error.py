"""A weight is replaced, and DDP complains one step too late.

Pruning puts a new `nn.Parameter` in place of a weight. DDP waits for the old one, so the whole bucket stays local and
the step goes wrong on all parameters. The error comes at the next forward.

variant of: parameter_replaced
seen in: pytorch#12603
ranks: 2
expect: DDP104
cause: replaced after wrapping
stage: params
step: 2
outliers: 0 1
parameter: 2.weight
exit: fails
also: DDP602
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def prune(layer, share):
    magnitude = layer.weight.detach().abs()
    kept = magnitude >= magnitude.quantile(share)
    layer.weight = nn.Parameter(layer.weight.detach() * kept)


def train():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    ddp = DDP(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(5):
        if step == 2:
            prune(model[2], 0.5)
            optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), inputs[:, :3].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
