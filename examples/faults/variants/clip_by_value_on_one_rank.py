"""Gradients clamped on one rank only, by a leftover of debugging.

variant of: clip_on_one_rank
seen in: -
ranks: 3
expect: DDP205
cause: clamped at 0.001 on rank 2
stage: applied
step: 1
outliers: 2
parameter: words.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, tokens):
        return self.score(self.words(tokens).mean(1))


def train():
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = DDP(Scorer(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(5):
        tokens = torch.randint(6, (8, 3), generator=data)
        optimizer.zero_grad()
        (model(tokens) - 1).square().mean().backward()
        if rank == 2 and step >= 1:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
