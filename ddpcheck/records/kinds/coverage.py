"""Records of what a rank trains: the parameters that its optimizers step, and which of them are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ddpcheck.records.registry import Record, record


class NotCompared(str, Enum):
    """Why a stepped parameter is not compared after each step (keys of `StepCoverageRecord.not_compared`)."""

    NO_MODULE = "no_module"  # in no DDP module
    DTENSOR = "dtensor"  # a DTensor outside of DDP: sharded by FSDP2, or tensor-parallel
    FLAT_PARAMETER = "flat_parameter"  # of FSDP1
    SHARDED = "sharded"  # each rank holds another part of it: there is no replica
    IGNORED = "ignored"  # DDP ignores it on the user's request
    COPY = "copy"  # a copy of parameters that are compared in its place
    WRAPPER_DELETED = "wrapper_deleted"  # its DDP module was deleted, and the optimizer still steps it


class Parallelism(str, Enum):
    """What else than DDP distributes the parameters of a process (`TrainingRecord.seen`)."""

    FSDP = "fsdp"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    MEGATRON = "megatron"
    DATA_PARALLEL = "data_parallel"
    DTENSOR = "dtensor"


@record("step_coverage")
@dataclass(frozen=True)
class StepCoverageRecord(Record):
    """The parameters that optimizers step at one line of the program: totals so far."""

    # Number of the group of optimizers on this rank. A later record replaces an earlier one.
    entry: int
    # Class of the optimizer, and the call site of its step in the user's code, as file:line.
    name: str
    where: str
    # Steps of the optimizer with the most.
    steps: int
    # Stepped parameters that belong to a module whose parameters are compared after each step.
    compared: int
    # Other stepped parameters, by `NotCompared`.
    not_compared: dict[str, int] = field(default_factory=dict)


@record("training")
@dataclass(frozen=True)
class TrainingRecord(Record):
    """What a rank trains without DDP. Written when a parameter is not compared, and at the end."""

    # Backwards before the first DDP module was wrapped.
    unwrapped_backwards: int = 0
    # Values of `Parallelism`.
    seen: list[str] = field(default_factory=list)
