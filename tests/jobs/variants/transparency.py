"""Ways in which a job could notice ddpcheck: modes that see every call, pickled functions."""

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
    """Counts the calls that a user's mode sees, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def count(self, function: Any, args: Any, kwargs: Any) -> Any:
        # The getters of properties all have the same name.
        self.seen[str(getattr(function, "__self__", function)).partition(" at 0x")[0]] += 1
        return function(*args, **(kwargs or {}))


class CountingFunctions(Counting, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.count(func, args, kwargs)


class CountingOperators(Counting, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.count(func, args, kwargs)


@variant()
def counted_by_modes(rank: int, world_size: int) -> list[Any]:
    """A user's mode sees the calls of the job and no others."""
    # For this dtype a sketch uses torch operators.
    with CountingFunctions() as functions, CountingOperators() as operators:
        ddp = DDP(net().to(torch.float64))
        optimizer = sgd(ddp)
        for number in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.full((3, WIDTH), rank + number, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    return [ddp, optimizer, sorted(functions.seen.items()), sorted(operators.seen.items())]


@variant()
def functions_by_pickle(rank: int, world_size: int) -> list[Any]:
    """Process pools pickle functions such as `torch.load` and `init_process_group`."""
    sent = [torch.load, dist.init_process_group, dist.destroy_process_group]
    assert all(pickle.loads(pickle.dumps(function)) is function for function in sent)
    ddp = DDP(net())
    return fit(ddp, sgd(ddp), rank)
