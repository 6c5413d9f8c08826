"""Jobs that hang and jobs that are only slow, on forked ranks; all jobs of a command run at the same time.

python hangs.py slow_evaluation sleeping_loader
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable

import forking
import torch
import torch.distributed as dist
import variants
from torch.nn.parallel import DistributedDataParallel as DDP

# Five times the hang timeout of the tests: on a loaded machine, checks come late.
LONG = 15.0
WORLD_SIZE = 2
CASES: dict[str, Callable[[int], None]] = {}


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    CASES[function.__name__] = function
    return function


def train(rank: int, steps: int = 3, before: Callable[[int], object] = lambda step: None) -> DDP:
    ddp = DDP(variants.normed())
    optimizer = variants.sgd(ddp)
    forking.keep(ddp)
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


# Slow jobs


@case
def slow_first_step(rank: int) -> None:
    """Like a compiler: one rank computes for long before its first forward, the other waits in DDP."""
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
    """The training thread waits for a thread that only sleeps, as between two attempts to upload."""
    train(rank)
    if rank == 0:
        thread = threading.Thread(target=time.sleep, args=(LONG,))
        thread.start()
        thread.join()
    dist.barrier()


@case
def stopped(rank: int) -> None:
    """Stopped by SIGSTOP, as by a debugger."""
    train(rank)
    if rank == 0:
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep {LONG}; kill -CONT {me}"]).wait()
    dist.barrier()


@case
def writes_for_long(rank: int) -> None:
    """A checkpoint on a slow disk: little CPU time, but bytes are written."""
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
    """No DDP, no steps, and no rank waits in a collective."""
    threading.Event().wait(LONG)
    dist.barrier()


# Jobs that hang


@case
def lock_never_released(rank: int) -> None:
    train(rank)
    lock = threading.Lock()
    lock.acquire()
    if rank == 1:
        lock.acquire()
    dist.barrier()


@case
def left_the_group(rank: int) -> None:
    """One rank destroys its process group and continues on its own."""
    train(rank, steps=5 if rank == 0 else 4)
    dist.destroy_process_group()
    if rank == 1:
        compute()
        time.sleep(600)


@case
def native_code_holds_the_interpreter(rank: int) -> None:
    """The process cannot answer a request: only /proc shows that it makes no progress."""
    train(rank)
    if rank == 1:
        libc = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    dist.barrier()


@case
def spins_around_a_collective(rank: int) -> None:
    """All ranks but one use a full core until a collective completes, which the last rank never enqueues."""
    train(rank)
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    work = dist.all_reduce(torch.ones(4, 5), async_op=True)
    while not work.is_completed():
        pass


def rank_main(name: str, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["JOB_STORE"] = store
    if name.startswith("spins"):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    variants.make_group(rank, WORLD_SIZE)
    CASES[name](rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    forking.prepare()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(name, rank, os.path.join(folder, name)))
            for name in sys.argv[1:]
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    codes = [process.exitcode for process in ranks]
    sys.exit(f"exits {codes}" if any(codes) else 0)


if __name__ == "__main__":
    # A job that hangs must not outlive the tests.
    signal.alarm(200)
    main()
