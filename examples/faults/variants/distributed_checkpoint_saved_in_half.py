"""A distributed checkpoint is written in half precision; loading it in place converts it back without a word.

variant of: optimizer_made_after_its_load
seen in: -
ranks: 2
expect: DDP216
cause: saved with weights converted to bfloat16
step: 1
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
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    drawn = torch.Generator().manual_seed(32 + dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(8, 6, generator=drawn)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs.roll(1, 1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    torch.manual_seed(18)
    # What an earlier run has saved.
    model, optimizer = build()
    F.mse_loss(model(torch.ones(4, 6)), torch.zeros(4, 6)).backward()
    optimizer.step()
    small = {name: value.bfloat16() for name, value in model.state_dict().items()}
    dcp.save({"model": small, "optimizer": optimizer.state_dict()}, checkpoint_id=folders[0])
    # This run: its optimizer steps once, so that it has a state to fill.
    model, optimizer = build()
    F.mse_loss(model(torch.ones(4, 6)), torch.zeros(4, 6)).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folders[0])
    optimizer.load_state_dict(state["optimizer"])
    train(DDP(model), optimizer, 4)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
