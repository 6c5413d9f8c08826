"""A script that starts its own ranks: `by_multiprocessing.py spawn|fork|forkserver [killed]`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile

# Under `python -I` the script's own folder is not on the path.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch.distributed as dist
import torch.multiprocessing as mp
from loop import batches, train

WORLD_SIZE = 2


def work(rank: int, store: str, case: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    train(batches(), lambda step: die() if case == "killed" and (rank, step) == (1, 1) else None)
    dist.destroy_process_group()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(method: str, case: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            work, (os.path.join(folder, "store"), case), nprocs=WORLD_SIZE, start_method=method
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
