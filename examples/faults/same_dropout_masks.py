"""One seed for all ranks, so that the models start equal; and so do the dropout masks.

DDP makes the models equal by itself. What the common seed does instead is to drop the same units on every
rank at every step: less noise than the number of ranks promises.

bug: 34
seen in: Lightning#16166
ranks: 2
expect: DDP306
cause: seeded its generator with the same number
stage: forward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, sequence):
        return self.head(self.layer(sequence).mean(1))


def train():
    torch.manual_seed(16)
    model = DDP(Block())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        sequence = torch.randn(4, 6, 8, generator=data)
        classes = torch.randint(4, (4,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(sequence), classes).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
