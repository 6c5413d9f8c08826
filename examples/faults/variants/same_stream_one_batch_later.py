"""Every rank reads the whole stream, after another warm-up: one rank trains on the batches of the other, a step later.

variant of: stream_not_split
seen in: -
ranks: 2
expect: DDP301
cause: at different positions
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        drawn = torch.Generator().manual_seed(5)
        while True:
            yield torch.randn(8, generator=drawn)


def train():
    torch.manual_seed(84)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = iter(DataLoader(Stream(), batch_size=16))
    if dist.get_rank() == 0:
        next(batches)  # to show an example
    for _ in range(12):
        inputs = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
