"""Optimizers that ranks do not have in common: other parameters in them, or one made anew in mid-run."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.digests import Stage


@dataclass(frozen=True)
class RecreatedOptimizer:
    """Ranks that went on with another optimizer than the others, from `step` on."""

    ranks: tuple[int, ...]
    step: int
    # Whether replicas are known to differ at the last step.
    parted: bool


def held_places(attempt: Attempt, module: ModuleKey, optimizer: int) -> dict[int, frozenset[int]]:
    """By rank, the places of the module's parameters that its optimizer steps."""
    return {
        number: frozenset(place for group in record.groups for place in group if place >= 0)
        for number, rank in attempt.of_module(module).items()
        for (of, key), record in rank.optimizers.items()
        if key == module and of == optimizer
    }


def made_anew(attempt: Attempt, module: ModuleKey) -> RecreatedOptimizer | None:
    """None where all ranks stepped with the same optimizers, or not equally often."""
    counts = {
        number: {of: steps for (key, of), steps in rank.steps.items() if key == module and of >= 0}
        for number, rank in attempt.of_module(module).items()
    }
    if len(counts) < 2 or not all(counts.values()):
        return None
    if (
        len({max(of.values()) for of in counts.values()}) > 1
        or len({tuple(sorted(of)) for of in counts.values()}) < 2
    ):
        return None
    everybodys = set.intersection(*(set(of) for of in counts.values()))
    before = [
        max(steps for number, steps in of.items() if number in everybodys)
        for of in counts.values()
        if set(of) - everybodys and set(of) & everybodys
    ]
    if not before:
        return None
    groups = groups_of({number: repr(sorted(of)) for number, of in counts.items()})
    lasts = [rank.last for rank in attempt.of_module(module).values() if rank.last is not None]
    same_moment = len({last.step for last in lasts}) == 1 and all(
        last.stage == Stage.PARAMS.value for last in lasts
    )
    parted = same_moment and len({last.root for last in lasts}) > 1
    return RecreatedOptimizer(outlier_ranks([ranks for _, ranks in groups]), min(before), parted)
