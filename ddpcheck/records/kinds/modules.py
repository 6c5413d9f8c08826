"""Records about DDP modules: the parameter list, later changes of it, join() and communication hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.registry import Record, record

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
