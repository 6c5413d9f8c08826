"""One rank waits for long, in ways that also occur in jobs that hang, while the others wait for it.

ranks: 2
expect: nothing
options: --hang-timeout 1
cases: file_lock_of_another_process file_lock_of_a_rank_that_works file_lock_in_turns polls_for_a_file slow_worker
  computes_with_a_pending_collective sleeps_between_retries leaves_after_the_last_step
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SECONDS = 3.0


class SlowPoints(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SECONDS / 2)
        return torch.ones(8)


def wait(case: str, rank: int, path: str) -> None:
    if case == "file_lock_of_another_process" and rank == 0:
        holder = subprocess.Popen(
            ["flock", path, "sh", "-c", f"echo; sleep {SECONDS}"], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        holder.wait()
    elif case == "file_lock_of_a_rank_that_works":
        with open(path) as file:
            if rank == 1:
                time.sleep(0.5)
            fcntl.flock(file, fcntl.LOCK_EX)
            if rank == 0:
                time.sleep(SECONDS)
    elif case == "file_lock_in_turns":
        for _ in range(3):
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(SECONDS / 6)
    elif case == "polls_for_a_file" and rank == 0:
        subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; touch {path}.ready"])
        while not os.path.exists(f"{path}.ready"):
            time.sleep(0.1)
    elif case == "slow_worker" and rank == 0:
        for _ in DataLoader(SlowPoints(), num_workers=1):
            pass
    elif case == "computes_with_a_pending_collective":
        work = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
        end = time.monotonic() + SECONDS
        while rank == 1 and time.monotonic() < end:
            torch.randn(64, 64).matmul(torch.randn(64, 64))
        if work is None:
            work = dist.all_reduce(torch.ones(4), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
    elif case == "sleeps_between_retries" and rank == 0:
        for _ in range(4):
            time.sleep(SECONDS / 4)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    path = [tempfile.mkstemp()[1] if rank == 0 else ""]
    dist.broadcast_object_list(path)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
        if step == 2:
            wait(case, rank, path[0])
            dist.barrier()
    if case == "leaves_after_the_last_step":
        if rank == 1:
            time.sleep(SECONDS)
        sys.exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
