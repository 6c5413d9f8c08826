"""Where a job could notice that it is watched: modes that hear every call, functions by pickle."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .registry import variant
from .small_jobs import STEPS, WIDTH, fit, net, sgd


class Counting:
    """What a mode of the user's hears of, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Counter[str] = Counter()

    def hear(self, function: Any, args: Any, kwargs: Any) -> Any:
        # Of a property only its getter has a name, and one that all of them share.
        self.heard[str(getattr(function, "__self__", function)).partition(" at 0x")[0]] += 1
        return function(*args, **(kwargs or {}))


class CountingFunctions(Counting, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.hear(func, args, kwargs)


class CountingOperators(Counting, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.hear(func, args, kwargs)


@variant()
def counted_by_modes(rank: int, world_size: int) -> list[Any]:
    """Modes are the user's code: they hear of what the job does, and of nothing else."""
    # Of these dtypes a sketch takes operators of torch.
    with CountingFunctions() as functions, CountingOperators() as operators:
        ddp = DDP(net().to(torch.float64))
        optimizer = sgd(ddp)
        for number in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.full((3, WIDTH), rank + number, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    return [ddp, optimizer, sorted(functions.heard.items()), sorted(operators.heard.items())]


@variant()
def functions_by_pickle(rank: int, world_size: int) -> list[Any]:
    """A pool that loads files is sent `torch.load` so, and an executor the way into the process group."""
    sent = [torch.load, dist.init_process_group, dist.destroy_process_group]
    assert all(pickle.loads(pickle.dumps(function)) is function for function in sent)
    ddp = DDP(net())
    return fit(ddp, sgd(ddp), rank)
