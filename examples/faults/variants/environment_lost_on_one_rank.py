"""One of three ranks is started by a shell of its own, which hands the environment on only in part.

variant of: -
seen in: -
ranks: 3
launcher: python
expect: DDP601
cause: no records of rank 2
step: none
outliers: 2
"""

import os
import socket
import subprocess
import sys

RANKS = 3


def train():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(67)
    model = DDP(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=data)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def start(rank, port):
    # As from another machine: what the launcher had set in PYTHONPATH is not there.
    lost = {"PYTHONPATH"} if rank == 2 else set()
    kept = {name: value for name, value in os.environ.items() if name not in lost}
    own = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, __file__], env={**kept, **own})


def main():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [start(rank, port) for rank in range(RANKS)]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
