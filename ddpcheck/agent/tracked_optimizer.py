"""A tracked optimizer: which DDP modules it steps, and how often it has stepped."""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.agent.tracked_module import TrackedModule

_is_step = torch_compat.frame_test(torch_compat.STEP_WRAPPER)


@dataclass(eq=False)
class TrackedOptimizer:
    """One optimizer; `steps` names the step under way: its finished ones, after those of a predecessor."""

    index: int
    name: str
    ref: weakref.ref[torch.optim.Optimizer]
    signature: tuple[int, ...]
    steps: int = 0
    # Whether a GradScaler scales the step under way; its scale, where it can be read without waiting.
    scaled: bool = False
    scale: float | None = None
    # The hyperparameters in force, and a short digest of them.
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    hyper: str = ""
    modules: list[TrackedModule] = field(default_factory=list)
    # Per module index: per group, the places of its parameters in the module's list.
    groups: dict[int, list[list[int]]] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read the hyperparameters of the step that was just taken; unchanged, they stay the same object."""
        optimizer = self.ref()
        if optimizer is None:
            return
        values = _hyperparameters(optimizer)
        if self.scale is not None:
            values["GradScaler.scale"] = self.scale
        if values != self.hyperparameters:
            self.hyperparameters = values
            text = json.dumps(values, sort_keys=True)
            self.hyper = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def owned(self, tracked: TrackedModule) -> set[int]:
        return {place for group in self.groups[tracked.index] for place in group if place >= 0}


def signature(optimizer: torch.optim.Optimizer, modules: Iterable[TrackedModule]) -> tuple[int, ...]:
    """Changes whenever the optimizer's or a module's set of parameters does."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return (*sizes, -1, *(tracked.revision for tracked in modules))


def groups_of(optimizer: torch.optim.Optimizer, tracked: TrackedModule) -> list[list[int]]:
    """Per group, where its parameters stand in the module's list; -1 for those of others."""
    places = {id(tensor): place for place, tensor in enumerate(tracked.tensors(tracked.parameters))}
    return [[places.get(id(p), -1) for p in group["params"]] for group in optimizer.param_groups]


def first_step(tracked: TrackedModule, groups: list[list[int]]) -> int:
    """The number of a new optimizer's first step: a job that makes its optimizer anew goes on counting.

    One that steps other parameters works beside the optimizers before it, and joins the step they took last.
    """
    earlier: set[int] = set().union(*tracked.owners.values())
    takes_over = any(place in earlier for group in groups for place in group)
    return tracked.steps if takes_over else max(tracked.steps - 1, 0)


def steps_inside_backward(optimizer: torch.optim.Optimizer) -> bool:
    """One of the many one-parameter optimizers that torch makes to step inside the backward.

    They step while the backward is under way, one parameter at a time: no moment to look at the whole module.
    """
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    return any(optimizer is other for other in torch_compat.read(torch_compat.IN_BACKWARD, first, ()))


def inside_another_step() -> bool:
    """Whether the step that called our hook was itself called from an optimizer's step, as ZeRO does.

    The inner one leaves parameters as they rightly are only on this rank: only the outermost step counts.
    Read off the stack, not counted, since a step that raises would leave a counter wrong for good.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        steps += _is_step(frame)
        frame = frame.f_back
    return steps > 1


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                values[f"{number}.{name}"] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it and ranks can compare it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        # NaN is not equal to itself, and would look changed at every step.
        return "nan" if isinstance(value, float) and value != value else value
    if isinstance(value, torch.Tensor):
        # A device tensor would have to be waited for.
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else "tensor"
    if isinstance(value, (list, tuple)) and len(value) <= 8:
        return [_plain(item) for item in value]
    # Anything else may hold addresses or user data: its kind is enough.
    return type(value).__name__
