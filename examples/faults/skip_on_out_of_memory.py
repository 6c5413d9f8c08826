"""A rank that runs out of memory leaves the step out, alone.

The loop catches the error and pushes a dummy batch through, so that the collectives still match; then it goes
on to the next batch without stepping. The other ranks do step.

bug: 22
seen in: fairseq#1359
ranks: 3
expect: DDP207
cause: a step was skipped on rank 2
stage: params
step: 3
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MEMORY = 40  # tokens that fit


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 30)

    def forward(self, tokens):
        if tokens.numel() > MEMORY:
            raise torch.OutOfMemoryError("out of memory (simulated)")
        return self.out(self.mix(self.words(tokens))[0])


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train():
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(50 + rank)
    for number in range(7):
        length = 16 if (number, rank) == (3, 2) else 8
        tokens = torch.randint(30, (4, length), generator=data)
        optimizer.zero_grad()
        try:
            loss_of(model, tokens).backward()
        except torch.OutOfMemoryError:
            (loss_of(model, tokens[:, :2]) * 0).backward()
            continue
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
