"""An IterableDataset that every rank reads from its beginning.

A sampler cannot split a stream, and DataLoader does not do it by itself. Each rank trains on all of it, in
the same order.

bug: 32
seen in: datasets#5360
ranks: 2
expect: DDP301
cause: IterableDataset
stage: forward
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    """Simulates a file that is read line by line."""

    def __iter__(self):
        numbers = torch.Generator().manual_seed(14)
        for _ in range(48):
            yield torch.randint(64, (7,), generator=numbers)


class NextWord(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 64)

    def forward(self, tokens):
        return self.out(self.memory(self.words(tokens))[0])


def train():
    torch.manual_seed(14)
    model = DDP(NextWord())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for tokens in DataLoader(Lines(), batch_size=6):
        optimizer.zero_grad()
        output = model(tokens[:, :-1])
        nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
