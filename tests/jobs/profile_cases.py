"""Small jobs with forked ranks for `ddpcheck run --profile`, one after the other; prints a digest of each one's state.

python profile_cases.py FOLDER case,case
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import battery
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, schedule, tensorboard_trace_handler

RANKS = 2
STEPS = 10
SLEEP = 0.15
# By so much rank 1 comes later to the first bucket, for which rank 0 then waits in the midst of its backward.
LATER = 0.08


class Slow(torch.autograd.Function):
    """Compute that leaves the processor to others."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return batch.view_as(batch)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowLinear(nn.Linear):
    """Its own gradients come first, the pause after them."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(Slow.apply(batch, SLEEP))


class Pause(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return Slow.apply(batch, self.seconds)


class Wide(nn.Module):
    """Many parameters, nearly all of which get a gradient of zero."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.weight[: batch.shape[1]]


def train(ddp: nn.Module, width: int, rank: int, steps: int = STEPS, profiler: Any = None) -> None:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(2, width, generator=generator)).square().mean().backward()
        optimizer.step()
        if profiler is not None:
            profiler.step()


def exposed(rank: int, folder: Path) -> nn.Module:
    """A lot to transfer and next to nothing to compute."""
    ddp = DDP(Wide(8_000_000))
    train(ddp, 4, rank)
    return ddp


def hidden(rank: int, folder: Path) -> nn.Module:
    """Little to transfer, and time enough to do it; only the last bucket has nothing to hide behind."""
    ddp = DDP(nn.Sequential(SlowLinear(16, 512), SlowLinear(512, 512), Pause(LATER * rank)))
    train(ddp, 16, rank)
    return ddp


def own_profiler(rank: int, folder: Path) -> nn.Module:
    """The program profiles by itself, in the very steps that are wanted."""
    ddp = DDP(nn.Linear(64, 64))
    window = schedule(wait=5, warmup=1, active=3, repeat=1)
    handler = tensorboard_trace_handler(str(folder / "mine"), f"rank{rank}")
    with profile(schedule=window, on_trace_ready=handler, record_shapes=True) as profiler:
        train(ddp, 64, rank, profiler=profiler)
    return ddp


def short(rank: int, folder: Path) -> nn.Module:
    """Over in the middle of the window."""
    ddp = DDP(nn.Linear(64, 64))
    train(ddp, 64, rank, steps=7)
    return ddp


CASES = {case.__name__: case for case in (exposed, own_profiler, short, hidden)}


def rank_main(name: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=rank, world_size=RANKS)
    ddp = CASES[name](rank, folder)
    battery.KEPT.append(ddp)
    state = torch.random.get_rng_state(), ddp
    os.write(1, f"{name} {rank} {battery.digest(state)}\n".encode())
    dist.destroy_process_group()


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for name in names:
        ranks = [context.Process(target=rank_main, args=(name, rank, folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)


if __name__ == "__main__":
    main()
