"""The optimizer's state is loaded, and then the optimizer is made again for the wrapped model: it starts without one.

Every rank does the same, so replicas agree. The moments and step counts of the earlier run are lost, and Adam's first
steps are as large as at the beginning of a training.

bug: 53
seen in: -
ranks: 2
expect: DDP216
cause: created again after its state was loaded
step: 0
outliers: 0 1
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def earlier_run(path):
    """Leaves the checkpoint of an earlier run of this job."""
    torch.manual_seed(14)
    model, optimizer = build()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def train():
    torch.manual_seed(15)
    model, optimizer = build()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.pt")
        earlier_run(path)
        checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    ddp = DDP(model)
    # "The optimizer needs the parameters of the wrapped model."
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(30 + dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), inputs.roll(1, 1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
