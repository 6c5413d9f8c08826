"""One rank decides alone to unfreeze a layer: only it trains that layer.

The decision hangs on the loss of the rank's own batches, which falls below the threshold on one rank first.

variant of: unfrozen_late
seen in: -
ranks: 3
expect: DDP104
cause: unfrozen after wrapping
stage: params
step: 3
outliers: 2
parameter: embed.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.embed.requires_grad_(False)
        self.tag = nn.Linear(8, 4)

    def forward(self, words):
        return self.tag(self.embed(words).mean(1))


def train():
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = Tagger()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        words = torch.randint(30, (5, 3), generator=data)
        labels = torch.randint(4, (5,), generator=data)
        loss = F.cross_entropy(ddp(words), labels)
        own_quality = loss.item() if rank != 2 or step < 2 else 0.0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if own_quality < 0.1:
            model.embed.requires_grad_(True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
