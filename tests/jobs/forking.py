"""Forks the ranks of a job from a parent that has imported torch: the import takes longer than most of these jobs."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # imported by DDP's constructor: once here instead of once in each rank

RANK_SECONDS = 300.0
# Imported by ddpcheck inside a rank.
_AGENT_MODULES = ("ddpcheck.agent.rank_context", "ddpcheck.agent.dispatcher")
_KEPT: list[Any] = []


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended; index is the rank."""

    pids: list[int]
    exits: list[int | None]
    # Ranks that were killed at the time limit.
    late: list[int]

    @property
    def ok(self) -> bool:
        return not self.late and not any(self.exits)


def prepare() -> None:
    """Call once in the parent, after its imports and before the first fork.

    A garbage collection writes to every object it visits. In a forked rank the kernel then copies most of the
    parent's heap, which takes longer than training, so objects of the parent are excluded from collections.
    """
    torch.set_num_threads(1)
    if "ddpcheck.agent" in sys.modules:
        for name in _AGENT_MODULES:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # Extension modules complain about objects that are left at the end of the interpreter.
    atexit.register(gc.unfreeze)


def keep(*things: Any) -> None:
    """Hold references until the process is gone.

    If the last reference to a process group is dropped while gloo's threads wait for the interpreter, the process
    sometimes never ends. A DDP module holds such a reference.
    """
    _KEPT.extend(things)


def run_ranks(
    target: Callable[..., None], world_size: int, *arguments: Any, seconds: float = RANK_SECONDS
) -> Ended:
    """Run `target(rank, *arguments)` in `world_size` forked processes; JOB_STORE names a new file for them to meet."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JOB_STORE"] = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_rank_main, args=(target, rank, *arguments), name=f"rank-{rank}")
            for rank in range(world_size)
        ]
        deadline = time.monotonic() + seconds
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in late:
            ranks[rank].kill()
            ranks[rank].join()
    return Ended([process.pid or 0 for process in ranks], [process.exitcode for process in ranks], late)


def _rank_main(target: Callable[..., None], rank: int, *arguments: Any) -> None:
    torch.set_num_threads(1)
    # Warnings of torch about its own interfaces are not the subject of these jobs.
    warnings.simplefilter("ignore")
    target(rank, *arguments)
