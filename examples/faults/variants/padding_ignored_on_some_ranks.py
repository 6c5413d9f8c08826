"""Padding has the number 0, and only ranks with the newer settings leave it out of the loss.

variant of: dropout_from_own_loss
seen in: -
ranks: 3
expect: DDP213
cause: ignore_index of the loss differs: 0 on ranks 0 and 2; -100 on rank 1
step: 0
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, LENGTH = 12, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, tokens):
        return self.out(self.words(tokens).cumsum(1).tanh())


def train():
    rank = dist.get_rank()
    padding = {} if rank == 1 else {"ignore_index": 0}
    torch.manual_seed(54)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(8):
        tokens = torch.randint(1, WORDS, (6, LENGTH), generator=drawn)
        tokens[:, -2:] = 0
        outputs = model(tokens[:, :-1])
        optimizer.zero_grad()
        loss = F.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none", **padding)
        loss.mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
