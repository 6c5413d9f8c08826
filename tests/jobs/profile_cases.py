"""Small jobs for `ddpcheck run --profile` on forked ranks; each rank prints a digest of its final state.

python profile_cases.py FOLDER case,case
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import battery
import forking
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, schedule, tensorboard_trace_handler

RANKS = 2
STEPS = 10
SLEEP = 0.15
# Delay of rank 1 before its first bucket, in seconds: rank 0 waits for that bucket during its backward.
LATER = 0.08


class Slow(torch.autograd.Function):
    """Simulates computation, without load on the CPU."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return batch.view_as(batch)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowLinear(nn.Linear):
    """Pauses in backward, after its own gradients are ready."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(Slow.apply(batch, SLEEP))


class Pause(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return Slow.apply(batch, self.seconds)


class Wide(nn.Module):
    """Many parameters, almost all with a gradient of zero."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.weight[: batch.shape[1]]


def train(
    ddp: nn.Module, width: int, rank: int, steps: int = STEPS, profiler: Any = None, pause: float = 0.0
) -> None:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(2, width, generator=generator)).square().mean().backward()
        optimizer.step()
        # Without load on the CPU: also on a busy machine, most of the step is not communication.
        time.sleep(pause)
        if profiler is not None:
            profiler.step()


def exposed(rank: int, folder: Path) -> nn.Module:
    """Much to transfer and almost nothing to compute."""
    ddp = DDP(Wide(8_000_000))
    train(ddp, 4, rank)
    return ddp


def hidden(rank: int, folder: Path) -> nn.Module:
    """Little to transfer during a long backward; only the last bucket cannot overlap with it."""
    ddp = DDP(nn.Sequential(SlowLinear(16, 512), SlowLinear(512, 512), Pause(LATER * rank)))
    train(ddp, 16, rank)
    return ddp


def own_profiler(rank: int, folder: Path) -> nn.Module:
    """The program uses torch.profiler itself, in the steps that ddpcheck wants to profile."""
    ddp = DDP(nn.Linear(64, 64))
    window = schedule(wait=5, warmup=1, active=3, repeat=1)
    handler = tensorboard_trace_handler(str(folder / "mine"), f"rank{rank}")
    with profile(schedule=window, on_trace_ready=handler, record_shapes=True) as profiler:
        train(ddp, 64, rank, profiler=profiler, pause=SLEEP)
    return ddp


def short(rank: int, folder: Path) -> nn.Module:
    """Ends in the middle of the profiled window."""
    ddp = DDP(nn.Linear(64, 64))
    train(ddp, 64, rank, steps=7, pause=SLEEP)
    return ddp


CASES = {case.__name__: case for case in (exposed, own_profiler, short, hidden)}


def rank_main(rank: int, name: str, folder: Path) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=rank, world_size=RANKS)
    ddp = CASES[name](rank, folder)
    forking.keep(ddp)
    state = torch.random.get_rng_state(), ddp
    os.write(1, f"{name} {rank} {battery.digest(state)}\n".encode())
    dist.destroy_process_group()


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    forking.prepare()
    for name in names:
        if not forking.run_ranks(rank_main, RANKS, name, folder).ok:
            sys.exit(1)


if __name__ == "__main__":
    main()
