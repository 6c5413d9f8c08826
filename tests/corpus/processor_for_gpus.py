"""Runs programs that ask for GPUs on the CPU: tensors that they move to a GPU stay where they are.

The order of forwards, backwards, hooks and joins, which tests of DDP are about, is the same on a CPU. Code that really
needs a device (streams, events, NCCL) still fails, with or without ddpcheck.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
# Names of tests that ask for at most as many GPUs as are simulated.
ASKING: set[str] = set()
_FACTORIES = (
    "arange",
    "empty",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def drop_conditions(devices: int) -> None:
    """Call before torch's test module is imported: it imports the conditions of its tests from another module."""
    from torch.testing._internal import common_distributed

    at_least = _if_there_are(devices, common_distributed.skip_if_lt_x_gpu)
    vars(common_distributed).update(skip_if_no_gpu=_as_it_is, skip_if_lt_x_gpu=at_least)


def lend(devices: int) -> None:
    """Call after torch's test module is imported: some of its imports are compiled and need torch's functions."""
    owner: Any
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, *_, **__: self
        owner.to = _without_device(owner.to)
    for name in _FACTORIES:
        setattr(torch, name, _without_device(getattr(torch, name)))
    torch.cuda.device_count = lambda: devices
    for name in ("set_device", "synchronize", "manual_seed"):
        # One function for each: torch.compile has a rule for each of them and distinguishes them.
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    DistributedDataParallel.__init__ = _without_ids(DistributedDataParallel.__init__)  # type: ignore[method-assign]


def _as_it_is(test: Callable[..., Any]) -> Callable[..., Any]:
    ASKING.add(test.__name__)
    return test


def _if_there_are(devices: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def condition(count: int, **options: Any) -> Any:
        return _as_it_is if count <= devices else original(count, **options)

    return condition


def _is_device(value: Any) -> bool:
    """Whether a value denotes a GPU, by number or by name."""
    if isinstance(value, bool):
        return False
    if isinstance(value, (int, torch.device)):
        return isinstance(value, int) or value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


def _without_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` with the CPU in place of a GPU; only `to` takes a device as a positional argument."""
    moves = original.__name__ == "to"

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if moves and len(args) > 1 and _is_device(args[1]):
            args = (args[0], CPU, *args[2:])
        if _is_device(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(*args, **kwargs)

    return wrapper


def _without_ids(original: Callable[..., None]) -> Callable[..., None]:
    """DDP's constructor without device ids."""

    @functools.wraps(original)
    def wrapper(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any
    ) -> None:
        original(self, module, **more)

    return wrapper
