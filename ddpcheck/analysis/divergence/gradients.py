"""Finds the first step at which ranks apply different gradients, and at which stage they parted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.divergence.optimizers import held_places
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.reason_text import reason_text
from ddpcheck.formatting import name_ranks
from ddpcheck.records.schema import AppliedRecord, Stage, TensorKind

SYNCED = "synced"
UNFINISHED = "unfinished"
BY_HAND = "gradients set without a backward"
HOOKS_LOST = "DDP's hooks are lost"


@dataclass(frozen=True)
class GradientDivergence:
    """Gradients of one module part at `found`; `code` says where on their way."""

    found: Disagreement
    code: str
    cause: str
    evidence: dict[str, Any] = field(default_factory=dict)
    parameter: str | None = None
    # Ranks whose last backward was not reduced; empty: no rank stands out.
    ranks: tuple[int, ...] = ()


def gradient_divergence(attempt: Attempt, module: ModuleKey) -> GradientDivergence | None:
    """None where all ranks applied the same gradients at every step that was compared."""
    found = attempt.agreement.tally(module, Stage.APPLIED, TensorKind.GRADIENTS).first
    if found is None or attempt.loose(module) or _structure_changed(attempt, module, found):
        return None
    # Gradients of other parameters are no other gradients.
    if len(set(held_places(attempt, module, found.moment.optimizer).values())) > 1:
        return None
    said = {rank: record for rank, record in found.sightings.items() if isinstance(record, AppliedRecord)}
    return _never_reduced(attempt, module, found, said) or _parted_on_the_way(attempt, module, found, said)


def _structure_changed(attempt: Attempt, module: ModuleKey, found: Disagreement) -> bool:
    """Parameters that the reducer does not know have gradients of their own on every rank: DDP104 tells."""
    return any(
        key == module and record.step <= found.moment.step
        for rank in attempt.of_module(module).values()
        for key, record in rank.structure
    )


def _never_reduced(
    attempt: Attempt, module: ModuleKey, found: Disagreement, said: dict[int, AppliedRecord]
) -> GradientDivergence | None:
    stray = {rank: record for rank, record in said.items() if record.last != SYNCED}
    if not stray:
        return _hooks_lost(attempt, module, found)
    first = stray[min(stray)]
    evidence: dict[str, Any] = {
        "last_backward": {str(rank): record.last for rank, record in said.items()},
        "reduced_backwards": {str(rank): record.synced for rank, record in said.items()},
        "other_backwards": {str(rank): record.unsynced for rank, record in said.items()},
    }
    if first.last == UNFINISHED:
        names = _names(attempt, module, first.waiting)
        evidence["unused_parameters"] = names[:10]
        cause = "reduction unfinished: no gradient came for " + ", ".join(names[:3])
        return GradientDivergence(
            found, "DDP202", cause, evidence, names[0] if names else None, tuple(sorted(stray))
        )
    cause = reason_text(first.reason) or BY_HAND
    return GradientDivergence(found, "DDP202", cause, evidence, ranks=tuple(sorted(stray)))


def _hooks_lost(attempt: Attempt, module: ModuleKey, found: Disagreement) -> GradientDivergence | None:
    """The order of forwards and backwards is right, yet every rank still holds its very own gradients."""
    tally = attempt.gradients.tallies.get(module)
    if tally is None or not tally.untouched or tally.touched_until >= found.moment.step:
        return None
    return GradientDivergence(found, "DDP202", HOOKS_LOST, {"untouched_backwards": tally.untouched})


def _parted_on_the_way(
    attempt: Attempt, module: ModuleKey, found: Disagreement, said: dict[int, AppliedRecord]
) -> GradientDivergence:
    tally = attempt.gradients.tallies.get(module)
    moved = [rank for rank, record in said.items() if record.moved]
    step = found.moment.step
    parted = tally is not None and tally.parted is not None and tally.together_until < step
    together = tally is not None and any(first <= step <= last for first, last in tally.together)
    # Writes through .data leave no mark, but what came out of the reduction was seen.
    if parted or not (moved or together):
        return GradientDivergence(found, "DDP203", "the reduction did not give all ranks the same result")
    evidence = {"written_after_backward_on_ranks": moved}
    cause = "gradients were written to between backward and step"
    if 0 < len(moved) < len(said):
        cause += f" on {name_ranks(moved)} only"
    return GradientDivergence(found, "DDP205", cause, evidence)


def _names(attempt: Attempt, module: ModuleKey, places: list[int]) -> list[str]:
    rows = next(iter(attempt.of_module(module).values())).as_wrapped[module].parameters
    return [str(rows[place][0]) for place in places if place < len(rows)]
