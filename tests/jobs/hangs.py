"""Jobs that hang, and jobs that only look as if they did: forked ranks, several jobs at a time.

python hangs.py slow_evaluation sleeping_loader
python hangs.py ../../examples/faults/early_stop_on_some_ranks.py:2
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import battery
import torch
import torch.distributed as dist
import variants
from torch.nn.parallel import DistributedDataParallel as DDP

# Longer than the timeout of the tests by more than the looks can be late.
LONG = 9.0
CASES: dict[str, Callable[[int], None]] = {}


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    CASES[function.__name__] = function
    return function


def train(rank: int, steps: int = 3, before: Callable[[int], object] = lambda step: None) -> DDP:
    ddp = DDP(variants.normed())
    optimizer = variants.sgd(ddp)
    battery.KEPT.append(ddp)
    for step, batch in enumerate(variants.batches(rank, steps)):
        before(step)
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    return ddp


def compute() -> None:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        torch.randn(64, 64).matmul(torch.randn(64, 64))


# Slow, not hung.


@case
def slow_first_step(rank: int) -> None:
    """As with a compiler: one rank works for long before its first forward, the other waits in DDP."""
    train(rank, before=lambda step: compute() if step == 0 and rank == 1 else None)


@case
def slow_evaluation(rank: int) -> None:
    train(rank)
    if rank == 0:
        compute()
    dist.barrier()


@case
def sleeping_loader(rank: int) -> None:
    train(rank, before=lambda step: time.sleep(LONG) if step == 2 and rank == 0 else None)


@case
def waits_for_a_process(rank: int) -> None:
    train(rank)
    if rank == 0:
        subprocess.run(["sleep", str(LONG)], check=True)
    dist.barrier()


@case
def waits_for_a_thread(rank: int) -> None:
    """The training thread waits for another one that only sleeps, as between two attempts to upload."""
    train(rank)
    if rank == 0:
        thread = threading.Thread(target=time.sleep, args=(LONG,))
        thread.start()
        thread.join()
    dist.barrier()


@case
def stopped(rank: int) -> None:
    """As by a debugger."""
    train(rank)
    if rank == 0:
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep {LONG}; kill -CONT {me}"]).wait()
    dist.barrier()


@case
def writes_for_long(rank: int) -> None:
    """A checkpoint on a slow disk: little processor time, but bytes flow."""
    train(rank)
    if rank == 0:
        with tempfile.NamedTemporaryFile() as file:
            for _ in range(int(LONG * 5)):
                file.write(bytes(1 << 16))
                file.flush()
                time.sleep(0.2)
    dist.barrier()


@case
def idle_without_ddp(rank: int) -> None:
    """No DDP, no steps, and nobody waits in a collective: a job that has nothing to do."""
    threading.Event().wait(LONG)
    dist.barrier()


# Hung.


@case
def lock_never_given_back(rank: int) -> None:
    train(rank)
    lock = threading.Lock()
    lock.acquire()
    if rank == 1:
        lock.acquire()
    dist.barrier()


@case
def left_the_group(rank: int) -> None:
    """One rank closes its process group and goes on with work of its own."""
    train(rank, steps=5 if rank == 0 else 4)
    dist.destroy_process_group()
    if rank == 1:
        compute()
        time.sleep(600)


@case
def native_code_holds_the_interpreter(rank: int) -> None:
    """Nothing in the process can answer: only the system can tell that it stands still."""
    train(rank)
    if rank == 1:
        libc = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    dist.barrier()


def rank_main(name: str, rank: int, world_size: int, port: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if name in CASES:
        os.environ["JOB_STORE"] = store
        variants.make_group(rank, world_size)
        CASES[name](rank)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [name]
    runpy.run_path(name, run_name="__main__")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for job in sys.argv[1:]:
            name, _, size = job.partition(":")
            world_size, port = int(size or 2), free_port()
            for rank in range(world_size):
                args = (name, rank, world_size, port, str(Path(folder, Path(name).stem)))
                ranks.append(context.Process(target=rank_main, args=args))
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    codes = [process.exitcode for process in ranks]
    sys.exit(f"exits {codes}" if any(codes) else 0)


if __name__ == "__main__":
    # A job that nobody ends must not outlive the tests.
    signal.alarm(200)
    main()
