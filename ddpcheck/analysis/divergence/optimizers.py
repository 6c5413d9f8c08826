"""Optimizers that are not the same on all ranks: they hold other parameters, or one was recreated during the run."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.digests import Stage


@dataclass(frozen=True)
class RecreatedOptimizer:
    """Ranks that continued with another optimizer than the others, from `step` on."""

    ranks: tuple[int, ...]
    step: int
    # Whether replicas are known to differ at the last step.
    diverged: bool


def stepped_parameters(attempt: Attempt, module: ModuleKey, optimizer: int) -> dict[int, frozenset[int]]:
    """By rank, the indices of the module's parameters that its optimizer steps."""
    return {
        number: frozenset(index for group in record.groups for index in group if index >= 0)
        for number, rank in attempt.of_module(module).items()
        for (owner, key), record in rank.optimizers.items()
        if key == module and owner == optimizer
    }


def recreated_optimizer(attempt: Attempt, module: ModuleKey) -> RecreatedOptimizer | None:
    """None if all ranks stepped with the same optimizers, or not equally often."""
    steps = {
        number: {
            optimizer: count
            for (key, optimizer), count in rank.steps.items()
            if key == module and optimizer >= 0
        }
        for number, rank in attempt.of_module(module).items()
    }
    if len(steps) < 2 or not all(steps.values()):
        return None
    if len({max(counts.values()) for counts in steps.values()}) > 1:
        return None
    if len({tuple(sorted(counts)) for counts in steps.values()}) < 2:
        return None
    shared = set.intersection(*(set(counts) for counts in steps.values()))
    before = [
        max(count for optimizer, count in counts.items() if optimizer in shared)
        for counts in steps.values()
        if set(counts) - shared and set(counts) & shared
    ]
    if not before:
        return None
    groups = groups_of({number: repr(sorted(counts)) for number, counts in steps.items()})
    lasts = [rank.last for rank in attempt.of_module(module).values() if rank.last is not None]
    comparable = len({last.step for last in lasts}) == 1 and all(
        last.stage == Stage.PARAMS.value for last in lasts
    )
    diverged = comparable and len({last.root for last in lasts}) > 1
    return RecreatedOptimizer(outlier_ranks([ranks for _, ranks in groups]), min(before), diverged)
