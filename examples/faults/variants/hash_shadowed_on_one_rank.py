"""On one of three machines a file of the job's own is called xxhash.py, and hides the library of that name.

variant of: -
seen in: -
ranks: 3
launcher: environment
expect: DDP604
cause: hash differs
step: none
outliers: 2
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def own_helpers():
    """A checkout that the other machines do not have; it holds a small hash of the job's own."""
    if os.environ["RANK"] != "2":
        return
    folder = Path("helpers")
    folder.mkdir(exist_ok=True)
    (folder / "xxhash.py").write_text("def checksum(data):\n    return sum(data) % 65521\n")
    sys.path.insert(0, str(folder.resolve()))


def train():
    torch.manual_seed(70)
    model = DDP(nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(12, (5, 3), generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    own_helpers()
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
