"""Only rank 0 loads the optimizer's state: equal weights, equal gradients, different steps.

The model is loaded everywhere, but Adam's moments and step count come back on rank 0 only. The other ranks start with
empty moments, and the first step already differs.

bug: 16
seen in: -
ranks: 3
expect: DDP206
cause: optimizer state was loaded on rank 0 only
stage: params
step: 0
outliers: 0
parameter: 0.weight
"""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    torch.manual_seed(53)
    model = nn.Sequential(nn.Linear(6, 18), nn.LeakyReLU(), nn.Linear(18, 6))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def saved_checkpoint():
    """Replaces the file of an earlier run."""
    model, optimizer = build()
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train():
    checkpoint = saved_checkpoint()
    model, optimizer = build()
    model.load_state_dict(checkpoint["model"])
    ddp = DDP(model)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(checkpoint["optimizer"])
    data = torch.Generator().manual_seed(160 + dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(7, 6, generator=data)
        optimizer.zero_grad()
        F.l1_loss(ddp(inputs), inputs.flip(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
