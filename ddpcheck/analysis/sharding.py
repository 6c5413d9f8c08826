"""Whether an optimizer deals its state out to the ranks."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.launch import Attempt

_ZERO = "ZeroRedundancyOptimizer"


def sharded(attempt: Attempt) -> bool:
    """By its class: state that happens to differ would look the same in the records."""
    return any(record.name == _ZERO for rank in attempt.ranks.values() for record in rank.optimizers.values())
