"""`no_sync()` is entered by hand and not left on one path: no later step is reduced.

The trainer opens `no_sync()` while it accumulates and closes it before the last batch. A batch that is skipped takes
the path that forgets to close it, and from then on every rank trains alone.

bug: 8
seen in: speechbrain#2010
ranks: 3
expect: DDP202
cause: no_sync open
stage: applied
step: 2
outliers: 0 1 2
parameter: project.weight
"""

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 10)
        self.listen = nn.LSTM(10, 10, batch_first=True)
        self.decide = nn.Linear(10, 4)

    def forward(self, frames):
        return self.decide(self.listen(self.project(frames))[0][:, -1])


class Trainer:
    def __init__(self, model):
        self.ddp = DDP(model)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=5e-3)
        self.unsynced = ExitStack()

    def fit_batch(self, frames, labels, first, skipped):
        if first:
            self.unsynced.enter_context(self.ddp.no_sync())
        elif not skipped:
            self.unsynced.close()
        F.cross_entropy(self.ddp(frames), labels).backward()
        if not first:
            self.optimizer.step()
            self.optimizer.zero_grad()


def train():
    torch.manual_seed(19)
    trainer = Trainer(Speech())
    data = torch.Generator().manual_seed(70 + dist.get_rank())
    for batch in range(8):
        frames = torch.randn(3, 7, 6, generator=data)
        labels = torch.randint(4, (3,), generator=data)
        trainer.fit_batch(frames, labels, first=batch % 2 == 0, skipped=batch == 5)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
