"""The schedule is restored, the optimizer's state is not: momenta start from zero in the middle of a training.

variant of: optimizer_made_after_its_load
seen in: -
ranks: 2
expect: DDP216
cause: load_state_dict was not called on the optimizer
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def saved_by_an_earlier_run(path):
    torch.manual_seed(16)
    model, optimizer, schedule = build()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        schedule.step()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def train():
    torch.manual_seed(17)
    model, optimizer, schedule = build()
    with tempfile.TemporaryDirectory() as folder:
        saved_by_an_earlier_run(os.path.join(folder, "last.pt"))
        checkpoint = torch.load(os.path.join(folder, "last.pt"), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    schedule.load_state_dict(checkpoint["schedule"])
    ddp = DDP(model)
    data = torch.Generator().manual_seed(31 + dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), inputs.roll(1, 1)).backward()
        optimizer.step()
        schedule.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
