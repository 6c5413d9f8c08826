"""A resumed job passes the state dict of a new optimizer to torch.distributed.checkpoint: it has no state to fill.

The load raises nothing. Weights are restored, and Adam begins with empty moments.

variant of: optimizer_made_after_its_load
seen in: -
ranks: 2
expect: DDP216
cause: is empty
step: 0
outliers: 0 1
"""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return net, torch.optim.Adam(net.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    drawn = torch.Generator().manual_seed(31 + dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(8, 8, generator=drawn)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs[:, :3]).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    torch.manual_seed(30)
    # What an earlier run has saved.
    net, optimizer = build()
    inputs = torch.ones(4, 8)
    F.mse_loss(net(inputs), inputs[:, :3]).backward()
    optimizer.step()
    dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folders[0])
    # This run.
    net, optimizer = build()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folders[0])
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(DDP(net), optimizer, 6)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
