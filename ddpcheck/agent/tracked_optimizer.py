"""A tracked optimizer: which DDP modules it steps, and how often it has stepped."""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.probes.digest.device_copy import HostCopy

_IMMUTABLE = frozenset({type(None), bool, int, float, str})
_step_wrappers = torch_compat.frames_of(torch_compat.STEP_WRAPPER)


@dataclass(eq=False)
class TrackedOptimizer:
    """One optimizer. `steps` is the index of the current step: finished steps, including those of a predecessor."""

    index: int
    name: str
    ref: weakref.ref[torch.optim.Optimizer]
    signature: tuple[int, ...]
    steps: int = 0
    # Whether it steps no DDP module in a job that has DDP modules: it does not count as a step of the job.
    side: bool = False
    # Whether a GradScaler scales the current step, and its scale if it can be read without waiting.
    scaled: bool = False
    scale: float | None = None
    # The scale of the current step, on its way from the device.
    pending_scale: HostCopy | None = None
    # The current hyperparameters, and a short digest of them.
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    hyper: str = ""
    modules: list[TrackedModule] = field(default_factory=list)
    # The outermost modules that FSDP shards and of which it steps parameters.
    roots: list[TrackedModule] = field(default_factory=list)
    # Per module index: per group, the indices of its parameters in the module's list.
    groups: dict[int, list[list[int]]] = field(default_factory=dict)
    # The values that `hyperparameters` was made from; empty if they may change in place.
    _values: list[Any] = field(default_factory=list)

    def read_scale(self) -> None:
        """Take over the scale that was copied from the device."""
        copy = self.pending_scale
        if copy is not None:
            # True, because GradScaler has waited for the device before it calls the step; then reading does not wait.
            copy.ready()
            self.set_scale(float(copy.rows()[0][0]))

    def set_scale(self, scale: float | None) -> None:
        # The same object while the value is the same: `refresh` compares by identity.
        known = self._values[0] if self._values else None
        self.scale = known if scale == known else scale
        self.pending_scale = None

    def refresh(self) -> None:
        """Read the hyperparameters of the last step. If they have not changed, the object stays the same."""
        optimizer = self.ref()
        if optimizer is None:
            return
        now = [self.scale, *chain.from_iterable(map(dict.values, optimizer.param_groups))]
        # By identity: a value may be of any type, and most programs leave all of them alone.
        if len(now) == len(self._values) and all(map(is_, now, self._values)):
            return
        values = _hyperparameters(optimizer)
        self._values = now if _are_immutable(optimizer) else []
        if self.scale is not None:
            values["GradScaler.scale"] = self.scale
        if values != self.hyperparameters:
            self.hyperparameters = values
            text = json.dumps(values, sort_keys=True)
            self.hyper = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def owned(self, tracked: TrackedModule) -> set[int]:
        return {index for group in self.groups[tracked.index] for index in group if index >= 0}


def signature(optimizer: torch.optim.Optimizer, modules: Iterable[TrackedModule]) -> tuple[int, ...]:
    """A value that changes whenever the set of parameters of the optimizer or of a module changes."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return (*sizes, -1, *[tracked.revision for tracked in modules])


def groups_of(optimizer: torch.optim.Optimizer, tracked: TrackedModule) -> list[list[int]]:
    """Per group, the indices of its parameters in the module's list; -1: not in this module."""
    indices = {id(tensor): index for index, tensor in enumerate(tracked.stepped_objects())}
    return [[indices.get(id(p), -1) for p in group["params"]] for group in optimizer.param_groups]


def first_step(tracked: TrackedModule, groups: list[list[int]]) -> int:
    """The index of a new optimizer's first step. An optimizer that replaces another one continues its count.

    An optimizer of other parameters runs next to the earlier ones, and its first step has the index of their last step.
    """
    earlier: set[int] = set().union(*tracked.owners.values())
    takes_over = any(index in earlier for group in groups for index in group)
    return tracked.steps if takes_over else max(tracked.steps - 1, 0)


def steps_inside_backward(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is one of the optimizers that torch creates per parameter to step inside the backward.

    They step one parameter at a time during the backward, so there is no point at which the module is complete.
    """
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    return any(optimizer is other for other in torch_compat.read(torch_compat.IN_BACKWARD, first, ()))


def inside_another_step() -> bool:
    """Whether the step that called our hook was itself called from an optimizer's step, as ZeRO does.

    Only the outermost step counts: after the inner one, parameters differ between ranks by design. This is read from
    the stack, since a counter would stay wrong after a step that raises.
    """
    return _step_wrappers(sys._getframe(1), 2) > 1


def _are_immutable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no hyperparameter can change without being replaced, as a learning rate in a tensor does."""
    return all(
        type(value) in _IMMUTABLE
        or (type(value) is tuple and all(type(each) in _IMMUTABLE for each in value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    )


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                values[f"{number}.{name}"] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    """`value` in a form that JSON supports and ranks can compare."""
    if value is None or isinstance(value, (bool, int, float, str)):
        # NaN is not equal to itself and would count as changed at every step.
        return "nan" if isinstance(value, float) and value != value else value
    if isinstance(value, torch.Tensor):
        # Reading a tensor on a device would wait for the device.
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else "tensor"
    if isinstance(value, (list, tuple)) and len(value) <= 8:
        return [_plain(item) for item in value]
    # Other objects may contain addresses or user data: only the type is recorded.
    return type(value).__name__
