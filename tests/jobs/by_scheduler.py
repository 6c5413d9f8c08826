"""A rank that srun or mpirun starts: `healthy`, `diverging`, `hanging` or `killed`. Rank 1 makes the mistake.

`until_signal` trains until SIGUSR1, as a scheduler sends it before the time limit. MASTER_PORT comes from the test.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def main(case: str) -> None:
    environ = os.environ
    rank = int(environ.get("OMPI_COMM_WORLD_RANK") or environ["SLURM_PROCID"])
    size = int(environ.get("OMPI_COMM_WORLD_SIZE") or environ["SLURM_STEP_NUM_TASKS"])
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    address = f"tcp://127.0.0.1:{environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in itertools.count() if case == "until_signal" else range(STEPS):
        if case == "hanging" and rank == 1 and step == 1:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if case == "killed" and rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.full((8, 4), float(rank + step))).square().mean().backward()
        optimizer.step()
        if case == "diverging" and rank == 1 and step == 1:
            with torch.no_grad():
                model.module.bias += 1.0
        if case == "until_signal":
            time.sleep(0.1)
            # All ranks end at the same step.
            signalled = torch.tensor(len(signals))
            dist.all_reduce(signalled)
            if signalled:
                print(f"told to end: {len(signals)}", flush=True)
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
