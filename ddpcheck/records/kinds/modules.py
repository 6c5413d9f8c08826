"""Records about DDP modules (parameters and their changes, join(), communication hooks), optimizers and losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddpcheck.records.registry import BlockTable, Record, record


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


@record("hyper", BlockTable(("optimizer",)))
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


@record("loss", BlockTable(("optimizer",)))
@dataclass(frozen=True)
class LossRecord(Record):
    """The loss that backward was called on, summed up for each of several consecutive steps."""

    optimizer: int
    # The first step.
    step: int
    # null: not a scalar, or not readable; "nan", "inf" and "-inf" are written as text.
    values: list[float | str | None]


class ModuleRole(str, Enum):
    """What a module record describes."""

    DDP = "ddp"
    # Parameters that an optimizer steps and that no DDP module holds.
    STEPPED = "stepped"
    # A module that takes part in training steps, is not trained and not inside a DDP module.
    USED = "used"
    # Shards of parameters that FSDP or a device mesh distributes.
    SHARDED = "sharded"
    # The outermost module that FSDP shards: its forwards and buffers. Its parameters are in modules of their own.
    ROOT = "sharded_root"


class UseEvidence(str, Enum):
    """How a module outside of DDP is connected with the training of a DDP module."""

    # Its output is an input of DDP's forward.
    FEEDS_FORWARD = "feeds_forward"
    # It reads the same batch as DDP's forward.
    SHARES_INPUT = "shares_input"
    # It runs between DDP's forward and the backward.
    IN_LOSS = "in_loss"
    # It is a moving average of the DDP module, or becomes a copy of it from time to time.
    FOLLOWS = "follows"
    COPIED = "copied"
    # The program makes new tensors of this kind again and again, as for a perturbation of each batch.
    RECREATED = "recreated"


# Ordinals of modules that are not wrapped begin here. They follow from the contents of a module.
FIRST_UNWRAPPED = 1 << 32
# Below these, those of shards that several ranks hold, and of the parameters of which each rank holds another part.
FIRST_SHARDED = 1 << 31
# Below those, the numbers of the outermost modules that FSDP shards.
FIRST_ROOT = 1 << 30
FIRST_WITHOUT_REPLICA = 3 << 30

# `mesh["kind"]` of shards on a mesh that is a part of the mesh of other parameters of the same optimizer.
PARTIAL = "partial"
# `ModuleRecord.mesh["kind"]` of parameters of which an optimizer steps copies: whole ones, or each rank another part.
COPIED, COPIED_IN_PARTS = "copied", "copied_in_parts"

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
    # Call site of the wrapping in the user's code, as file:line. Of a module that is not wrapped: of its first call.
    where: str = ""
    role: str = ModuleRole.DDP.value
    # Counts the changes of its set of parameters on this rank.
    revision: int = 0
    # Of shards: `kind`, and `dims`, `shape` and `coordinates` of the mesh, by rank of the group. Of parameters beside
    # shards: the names of those `inside` of a module that FSDP manages.
    mesh: dict[str, Any] = field(default_factory=dict)


# Among the options of a module: DDP's reducer in Python, which torch.compile can make part of a compiled backward.
PYTHON_REDUCER = "python_reducer"


@record("module_use")
@dataclass(frozen=True)
class ModuleUseRecord(Record):
    """A module outside of DDP took part in the first training steps. `evidence`: values of `UseEvidence`."""

    module: int
    evidence: list[str] = field(default_factory=list)


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
