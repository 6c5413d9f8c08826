"""The cost of ddpcheck as reports show it. Times are microseconds per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankCost:
    """What ddpcheck took on one rank: means over its steps."""

    rank: int
    steps: int
    # The job's own step, without ddpcheck.
    step_us: float
    # ddpcheck in the training thread, and as a share of the job's own step; null: no step was measured.
    cost_us: float
    share: float | None
    # By probe.
    by_probe: Mapping[str, float]
    # ddpcheck's kernels on the device; null: not known.
    device_us: float | None = None


@dataclass(frozen=True)
class SchedulePart:
    """Steps that were checked equally often: at every N-th step."""

    first_step: int
    last_step: int
    # The AllReduce was verified, applied gradients and parameters were compared at every N-th of these steps.
    allreduce_every: int
    applied_every: int
    params_every: int
    # Over all ranks.
    cost_us: float
    share: float | None


@dataclass(frozen=True)
class LeftOut:
    """Steps at which the budget left out a check."""

    allreduce: int = 0
    applied: int = 0
    params: int = 0


@dataclass(frozen=True)
class CostTable:
    """The cost of one attempt."""

    # The limit in percent of a step; null: there was none, or it is not known.
    budget: float | None
    # Means over all ranks.
    cost_us: float
    share: float | None
    by_probe: Mapping[str, float]
    # The rank with the highest share.
    highest: int
    # At most 256: those with the highest share.
    ranks: tuple[RankCost, ...]
    of: int
    schedule: tuple[SchedulePart, ...]
    left_out: LeftOut = LeftOut()
