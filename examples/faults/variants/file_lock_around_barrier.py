"""A cache is built under a file lock, with a barrier inside.

The first rank that gets the lock waits for the others at the barrier; they wait for the lock, for ever.

variant of: evaluation_on_rank_0_only
ranks: 2
expect: DDP603
cause: hold
step: 3
outliers: 0
options: --hang-timeout 5
hangs: yes
"""

import fcntl
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def refresh_cache(path: str) -> None:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("vocabulary")
        dist.barrier()  # so that all ranks see the new file


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
        if step == 2:
            time.sleep(rank)  # reads its part of the files
            refresh_cache(os.path.join(folder[0], "cache"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
