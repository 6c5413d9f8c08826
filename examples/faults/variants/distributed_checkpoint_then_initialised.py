"""A resumed job loads a distributed checkpoint and then builds its wrapper by a function that initialises the weights.

variant of: checkpoint_under_other_names
seen in: -
ranks: 2
expect: DDP216
cause: initialised again
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


def initialise(layer):
    if isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.uniform_(layer.bias, -0.1, 0.1)


def wrapped(net):
    net.apply(initialise)
    return DDP(net)


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
    net, _ = build()
    dcp.save({"model": net.state_dict()}, checkpoint_id=folders[0])
    # This run: the tensors of the state dict are those of the model, so the load fills the model itself.
    net, optimizer = build()
    dcp.load({"model": net.state_dict()}, checkpoint_id=folders[0])
    train(wrapped(net), optimizer, 6)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
