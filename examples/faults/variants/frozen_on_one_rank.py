"""One rank freezes the embedding when its own loss stalls: it sends zeros for it, and the mean shrinks by a third.

DDP looks for unused parameters, so it does not complain.

variant of: eval_left_on_one_rank
seen in: -
ranks: 3
expect: DDP213
cause: frozen on rank 0
step: 3
outliers: 0
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
        self.tag = nn.Linear(8, 4)

    def forward(self, words):
        return self.tag(self.embed(words).mean(1))


def train():
    rank = dist.get_rank()
    torch.manual_seed(9)
    model = DDP(Tagger(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    drawn = torch.Generator().manual_seed(rank)
    for step in range(7):
        words = torch.randint(30, (8, 5), generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(words), words[:, 0] % 4).backward()
        optimizer.step()
        if step == 2 and rank == 0:  # "no improvement any more"
            model.module.embed.requires_grad_(False)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
