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
