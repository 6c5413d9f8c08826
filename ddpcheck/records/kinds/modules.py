"""Records about DDP modules (parameters and their changes, join(), communication hooks), optimizers and losses."""

from __future__ import annotations

from dataclasses import dataclass, field
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


# Part of the name of a communication hook under which replicas differ between averagings.
LOCAL_SGD_HOOK = "post_localSGD"


@record("module")
@dataclass(frozen=True)
class ModuleRecord(Record):
    """A DDP module when it was wrapped, or after its set of parameters changed."""

    module: int
    name: str
    # Global ranks of its process group, and the number of modules wrapped in that group before: identical on all.
    group: list[int]
    ordinal: int
    # [name, dtype, shape, trainable]
    parameters: list[list[Any]]
    buffers: list[list[Any]]
    ignored: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    # Call site of the wrapping in the user's code, as file:line.
    where: str = ""


@record("structure")
@dataclass(frozen=True)
class StructureRecord(Record):
    """A parameter was added, replaced, removed or unfrozen after wrapping."""

    module: int
    change: str
    parameter: str
    step: int
    forward: int


@record("join")
@dataclass(frozen=True)
class JoinRecord(Record):
    """The module trains inside `join()`: ranks may take different numbers of steps."""

    module: int
    step: int


@record("comm_hook")
@dataclass(frozen=True)
class CommHookRecord(Record):
    """The user registered a communication hook: it replaces DDP's own reduction of gradients."""

    module: int
    hook: str
    step: int
