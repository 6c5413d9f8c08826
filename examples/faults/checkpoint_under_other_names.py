"""A checkpoint of the wrapper is loaded into the bare model with strict=False: no name matches, nothing is loaded.

`ddp.state_dict()` puts `module.` before every name. The job says that it resumes, and trains from scratch.

bug: 52
seen in: -
ranks: 2
expect: DDP216
cause: names differ by a prefix
step: 0
outliers: 0 1
parameter: 0.weight
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))


def earlier_run(path):
    """Leaves the checkpoint of an earlier run of this job."""
    torch.manual_seed(4)
    saved = DDP(build())
    torch.save(saved.state_dict(), path)


def train():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.pt")
        earlier_run(path)
        torch.manual_seed(5)
        model = build()
        model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(20 + dist.get_rank())
    for _ in range(4):
        inputs, labels = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
