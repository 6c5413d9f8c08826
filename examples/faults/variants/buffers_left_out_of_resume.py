"""A resumed job loads named parameters only: the running statistics of normalisation layers begin from nothing.

Optimizer and weights continue where they were, so the loss looks right in training mode.

variant of: head_left_out_of_checkpoint
seen in: -
ranks: 2
expect: DDP216
cause: the state dict that was loaded lacks them
step: 0
outliers: 0 1
parameter: 1.running_mean
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def earlier_run(path):
    """What the file holds after some steps of an earlier job."""
    torch.manual_seed(88)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(9)
    for _ in range(4):
        inputs = torch.randn(16, 8, generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def train(path):
    torch.manual_seed(89)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    checkpoint = torch.load(path, weights_only=True)
    names = dict(model.named_parameters())
    weights = {name: tensor for name, tensor in checkpoint["model"].items() if name in names}
    model.load_state_dict(weights, strict=False)
    ddp = DDP(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    optimizer.load_state_dict(checkpoint["optimizer"])
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(16, 8, generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.pt")
        earlier_run(path)
        train(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
