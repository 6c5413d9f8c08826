"""`init_sync=False` on models that every rank initialised from its own seed.

The broadcast at wrapping was switched off to start faster. Gradients are averaged as ever, over models that
never were the same.

bug: 28
seen in: -
ranks: 3
expect: DDP101
cause: init_sync=False
stage: init.after
step: none
outliers: 0 1 2
parameter: embed.weight
torch: 2.8
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(40, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, words):
        return self.head(self.embed(words))


def train():
    rank = dist.get_rank()
    torch.manual_seed(1000 + rank)
    model = DDP(Bag(), init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        words, classes = torch.randint(40, (8, 5)), torch.randint(2, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), classes).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
