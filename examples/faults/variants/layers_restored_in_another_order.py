"""Layers are renamed for a new version of the model, and the names are counted from the wrong end.

variant of: optimizer_made_after_its_load
seen in: -
ranks: 2
expect: DDP216
cause: mapped to each other in another way
step: 0
outliers: 0 1
parameter: 3.weight
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DEPTH = 4


def build():
    model = nn.Sequential(nn.Linear(7, 16), *(nn.Linear(16, 16) for _ in range(DEPTH)), nn.Linear(16, 2))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def saved_by_an_earlier_run(path):
    torch.manual_seed(21)
    model, optimizer = build()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 7)).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def renamed(state):
    """The two layers in the middle get each other's names."""
    numbers = {2: 3, 3: 2}
    names = {name: name.split(".") for name in state}
    return {f"{numbers.get(int(n), n)}.{kind}": state[name] for name, (n, kind) in names.items()}


def train():
    torch.manual_seed(22)
    model, optimizer = build()
    with tempfile.TemporaryDirectory() as folder:
        saved_by_an_earlier_run(os.path.join(folder, "last.pt"))
        checkpoint = torch.load(os.path.join(folder, "last.pt"), weights_only=True)
    model.load_state_dict(renamed(checkpoint["model"]))
    optimizer.load_state_dict(checkpoint["optimizer"])
    ddp = DDP(model)
    data = torch.Generator().manual_seed(33 + dist.get_rank())
    for _ in range(4):
        inputs, labels = torch.randn(8, 7, generator=data), torch.randint(2, (8,), generator=data)
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
