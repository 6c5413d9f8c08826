"""Forward through `ddp.module`: the wrapper does not see the backward.

After two warm-up steps the loop calls a method of the model itself, which DDP does not pass on, so it goes through
`.module`. The reducer is never armed, each rank applies the gradients of its own batch, and the loss still goes down.

bug: 1
seen in: minimind#853
ranks: 2
expect: DDP202
cause: wrapper bypassed
stage: applied
step: 2
outliers: 0 1
parameter: embed.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class NextToken(nn.Module):
    def __init__(self, words=32, width=16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        hidden, _ = self.mix(self.embed(tokens))
        return self.head(hidden)

    def loss(self, tokens):
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train():
    torch.manual_seed(7)
    ddp = DDP(NextToken())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(5):
        tokens = torch.randint(32, (4, 9), generator=data)
        optimizer.zero_grad()
        if step < 2:
            loss = F.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        else:
            loss = ddp.module.loss(tokens)
        loss.backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
