"""Jobs whose steps take a known time in each phase, on forked ranks: stragglers, and even ranks.

    python clock_cases.py --cases slow_forward,even --world-size 2

Work is sleep, so it takes the same time on a machine with fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import forking
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH = 8
# Whether each rank, with its threads, is pinned to one core.
PINNED = "JOB_PINNED" in os.environ
# Whether ranks get real-time priority, where the system permits it: a rank that sleeps then wakes up in time however
# busy the machine is. The ranks use little CPU.
FIRST = "JOB_FIRST" in os.environ
# The straggler, in cases that have one.
LATE = 1

Case = Callable[["Job"], None]
# Options of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Sleeps(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return grads[0], None, None


class Net(nn.Module):
    """Sleeps between two layers; with `buffers`, BatchNorm follows."""

    def __init__(self, forward: float, backward: float, buffers: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else nn.Identity()
        self.outer = nn.Linear(WIDTH, 1)
        self.forward_seconds, self.backward_seconds = forward, backward

    def forward(self, x: torch.Tensor) -> Any:
        slept = Sleeps.apply(self.inner(x), self.forward_seconds, self.backward_seconds)  # type: ignore[no-untyped-call]
        return self.outer(self.norm(slept))


class Samples(Dataset[torch.Tensor]):
    """Reading a batch of four takes `seconds`."""

    def __init__(self, seconds: float, size: int) -> None:
        self.seconds = seconds / 4
        self.data = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.data[index]


class Slow(torch.optim.SGD):
    """Sleeps in each step."""

    seconds = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


class Job:
    """The training of one rank; its phases take the same time on all ranks unless a case changes that."""

    def __init__(self, rank: int, world_size: int, steps: int, scale: float) -> None:
        self.rank, self.world_size, self.steps = rank, world_size, steps
        self.scale = scale

    @property
    def late(self) -> bool:
        return self.rank == LATE

    def train(
        self,
        forward: float = 0.03,
        backward: float = 0.02,
        data: float = 0.004,
        optimizer: float = 0.0,
        other: float = 0.0,
        micro: int = 1,
        buffers: bool = False,
        workers: int = 0,
        pause_every: int = 0,
        with_scratch: bool = False,
    ) -> None:
        forward, backward, data, optimizer, other = (
            self.scale * part for part in (forward, backward, data, optimizer, other)
        )
        net: nn.Module = Net(forward / micro, backward / micro, buffers)
        ddp = DDP(nn.Sequential(net, Scratch()) if with_scratch else net)
        forking.keep(ddp)
        slow = Slow(ddp.parameters(), lr=0.01)
        slow.seconds = optimizer
        dataset = Samples(data / micro, 4 * micro * self.steps * self.world_size)
        sampler: Any = DistributedSampler(dataset, self.world_size, self.rank)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)
        for number, batch in enumerate(loader):
            last = (number + 1) % micro == 0
            if last:
                ddp(batch).square().mean().backward()
            else:
                with ddp.no_sync():
                    ddp(batch).square().mean().backward()
                continue
            slow.step()
            slow.zero_grad()
            time.sleep(other)
            if pause_every and number % pause_every == 0:
                time.sleep(10 * (forward + backward))


@case
def even(job: Job) -> None:
    job.train()


@case
def even_with_pauses(job: Job) -> None:
    """Rank 0 alone pauses at some steps, as for an evaluation."""
    job.train(pause_every=10 if job.rank == 0 else 0)


class Lengthens(nn.Module):
    """Sleeps for a share of the CPU time of the last step, so that the share is the same on a busy machine."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self._before = time.thread_time()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = time.thread_time()
        time.sleep(self.share * (now - self._before))
        self._before = now
        return x


def compute(job: Job, width: int, threads: int, longer: float = 0.0, batch: int = 64) -> None:
    """Real computation: ranks and threads compete for cores."""
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    ddp = DDP(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), Lengthens(longer)))
    forking.keep(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(job.rank)
    # More steps where steps are short, so that the job is long enough for the rule.
    for _ in range(job.steps * max(1, 2048 // width * 64 // batch)):
        optimizer.zero_grad()
        ddp(torch.randn(batch, width)).square().mean().backward()
        optimizer.step()


@case
def computing_small(job: Job) -> None:
    compute(job, 256, threads=1)


@case
def computing_large(job: Job) -> None:
    compute(job, 1024, threads=1)


@case
def computing_on_threads(job: Job) -> None:
    compute(job, 1024, threads=2)


@case
def computing_much(job: Job) -> None:
    """A large batch: much computation for each byte to reduce."""
    compute(job, 1024, threads=1, batch=512)


@case
def computing_slowly(job: Job) -> None:
    """Real computation; the straggler has a fifth more."""
    compute(job, 1024, threads=1, longer=0.2 if job.late else 0.0)


class Scratch(nn.Module):
    """Returns its input; fills memory on the way and frees it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            torch.ones(2 << 20)
        return x


@case
def memory_given_back(job: Job) -> None:
    """The same work on all ranks, but on the straggler the C library returns freed memory to the system at once."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 128 << 10 if job.late else 32 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    job.train(with_scratch=True)


@case
def slow_forward(job: Job) -> None:
    job.train(forward=0.041 if job.late else 0.03)


@case
def much_slower_forward(job: Job) -> None:
    """Clearly slower, on a busy machine too."""
    job.train(forward=0.1 if job.late else 0.03)


@case
def slow_forward_alone(job: Job) -> None:
    """The straggler's work on every rank, for comparison."""
    job.train(forward=0.041)


@case
def slow_backward(job: Job) -> None:
    job.train(backward=0.031 if job.late else 0.02)


@case
def slow_data(job: Job) -> None:
    job.train(data=0.015 if job.late else 0.004)


@case
def slow_data_workers(job: Job) -> None:
    """One worker reads ahead, but a batch takes it a fifth longer than a step."""
    job.train(data=0.072 if job.late else 0.004, workers=1)


@case
def slow_optimizer(job: Job) -> None:
    job.train(optimizer=0.011 if job.late else 0.0)


@case
def slow_other(job: Job) -> None:
    """Time outside forward, backward and optimizer, such as logging on one rank."""
    job.train(other=0.011 if job.late else 0.0)


@case
def slow_accumulating(job: Job) -> None:
    job.train(forward=0.041 if job.late else 0.03, micro=2)


@case
def slow_with_buffers(job: Job) -> None:
    """Rank 0 broadcasts its buffers at the start of each forward, where the others wait for it."""
    job.train(forward=0.041 if job.rank == 0 else 0.03, buffers=True)


def rank_main(rank: int, name: str, world_size: int, steps: int, scale: float) -> None:
    if PINNED:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if FIRST:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    path = os.environ["JOB_STORE"]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    CASES[name](Job(rank, world_size, steps, scale))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True, help="names, separated by commas, or all")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all sleeps")
    options = parser.parse_args()
    forking.prepare()
    names = list(CASES) if options.cases == "all" else options.cases.split(",")
    size, arguments = options.world_size, (options.world_size, options.steps, options.scale)
    ended = [forking.run_ranks(rank_main, size, name, *arguments, seconds=600.0) for name in names]
    sys.exit(not all(job.ok for job in ended))


if __name__ == "__main__":
    main()
