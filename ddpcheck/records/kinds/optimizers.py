"""Records about optimizers: their parameter groups, hyperparameters, skipped steps and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpcheck.records.registry import Record, record


@record("optimizer")
@dataclass(frozen=True)
class OptimizerRecord(Record):
    """An optimizer that steps parameters of a DDP module."""

    optimizer: int
    name: str
    module: int
    # Per parameter group, the indices of its parameters in the module's list (-1: not in the module).
    groups: list[list[int]]
    # Call site of the first step in the user's code, as file:line.
    where: str = ""


@record("hyper")
@dataclass(frozen=True)
class HyperRecord(Record):
    """Hyperparameters that changed at a step, by "group.name"."""

    optimizer: int
    step: int
    changed: dict[str, Any]


@record("skip")
@dataclass(frozen=True)
class SkipRecord(Record):
    """GradScaler skipped an optimizer step, as it does on overflow."""

    optimizer: int | None
    module: int | None
    step: int
    forward: int
    scale: float | None = None


@record("loss")
@dataclass(frozen=True)
class LossRecord(Record):
    """The loss that backward was called on, summed up for each of several consecutive steps."""

    optimizer: int
    # The first step.
    step: int
    # null: not a scalar, or not readable; "nan", "inf" and "-inf" are written as text.
    values: list[float | str | None]
