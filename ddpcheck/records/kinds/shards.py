"""Records about shards of parameters: steps that lacked their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ddpcheck.records.registry import Record, record


class PendingReason(str, Enum):
    """Why FSDP keeps gradients instead of reducing them (`PendingGradientsRecord.reason`)."""

    # set_requires_gradient_sync(False), and set_requires_all_reduce(False).
    SYNC_OFF = "sync_off"
    ALL_REDUCE_OFF = "all_reduce_off"


@record("pending_gradients")
@dataclass(frozen=True)
class PendingGradientsRecord(Record):
    """An optimizer stepped shards whose gradients FSDP had not reduced yet. A later record replaces an earlier one."""

    module: int
    optimizer: int
    # The first such step, and how many there were so far.
    step: int
    steps: int
    reason: str
    # Names of the first shards without a gradient, and how many there are.
    parameters: list[str] = field(default_factory=list)
    count: int = 0
    # Call site of the step in the user's code, as file:line.
    where: str = ""


@record("reduced_shards")
@dataclass(frozen=True)
class ReducedShardsRecord(Record):
    """A parameter whose gradients FSDP2 reduces, written before the first of its reductions."""

    # Number of the parameter on this rank, and its name.
    index: int
    name: str
    # Dtypes that the gradient passes through: as computed, in the reduction, as applied.
    dtypes: list[str]
    # Elements of the whole gradient, the number of its shards, and the one that this rank receives.
    numel: int
    shards: int
    position: int
    # All ranks that contribute. Their sum is divided by `divisor`.
    ranks: list[int]
    divisor: float
    # Class of the job's own implementation of the reduce-scatter.
    custom: str = ""


@record("shard_reduction")
@dataclass(frozen=True)
class ShardReductionRecord(Record):
    """Sketches of the gradients of one backward, before and after FSDP2 reduced them."""

    step: int
    # Numbers of the parameters (`ReducedShardsRecord.index`).
    indices: list[int]
    # Packed sketches: of the whole local gradients, each shard with the weight of its position, and of the shards of
    # this rank in the result, without a weight.
    local: str
    reduced: str
    # Parameters whose shards had a gradient before, to which the result was added, and the sketches of these.
    kept: list[int] = field(default_factory=list)
    before: str = ""
