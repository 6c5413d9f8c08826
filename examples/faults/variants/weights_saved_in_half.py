"""A checkpoint is saved in half precision to save space: each resume continues with rounded weights.

variant of: optimizer_made_after_its_load
seen in: -
ranks: 2
expect: DDP216
cause: saved with weights converted to bfloat16
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
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def saved_by_an_earlier_run(path):
    torch.manual_seed(18)
    model, optimizer = build()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    small = {name: value.bfloat16() for name, value in model.state_dict().items()}
    torch.save({"model": small, "optimizer": optimizer.state_dict()}, path)


def train():
    torch.manual_seed(19)
    model, optimizer = build()
    with tempfile.TemporaryDirectory() as folder:
        saved_by_an_earlier_run(os.path.join(folder, "last.pt"))
        checkpoint = torch.load(os.path.join(folder, "last.pt"), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    ddp = DDP(model)
    data = torch.Generator().manual_seed(32 + dist.get_rank())
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
