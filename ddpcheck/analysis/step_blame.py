"""Which rank left a step out, or took one too many, once ranks are known to have stepped at different forwards."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import Disagreement, groups_of, odd_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.schema import AppliedRecord, Of, Stage


def blame_for_a_step(attempt: Attempt, module: ModuleKey, root: Disagreement) -> tuple[str, tuple[int, ...]]:
    """In words, and the ranks; all of them where nothing tells who is right."""
    return _by_backwards(attempt, module, root) or _by_majority(root)


def _by_backwards(
    attempt: Attempt, module: ModuleKey, root: Disagreement
) -> tuple[str, tuple[int, ...]] | None:
    """All ranks reduce together. Who applies more reductions at once has left a step out; who applies none
    has taken one too many."""
    applied = attempt.agreement.tally(module, Stage.APPLIED, Of.GRADIENTS).first
    if applied is None or (applied.moment.step, applied.moment.optimizer) != (
        root.moment.step,
        root.moment.optimizer,
    ):
        return None
    reduced = {
        r: record.synced for r, record in applied.sightings.items() if isinstance(record, AppliedRecord)
    }
    fewest = min(reduced.values())
    if fewest == max(reduced.values()):
        return None
    ranks = tuple(
        sorted(r for r, count in reduced.items() if (count == 0 if fewest == 0 else count > fewest))
    )
    return f"a step was {'added' if fewest == 0 else 'left out'} on {name_ranks(ranks)}", ranks


def _by_majority(root: Disagreement) -> tuple[str, tuple[int, ...]]:
    forwards = {rank: record.forward or 0 for rank, record in root.sightings.items()}
    groups = groups_of({rank: str(count) for rank, count in forwards.items()})
    odd = odd_ranks([ranks for _, ranks in groups])
    behind = tuple(rank for rank in odd if forwards[rank] > min(forwards.values()))
    ahead = tuple(rank for rank in odd if forwards[rank] < max(forwards.values()))
    if len(odd) < len(forwards) and behind and not ahead:
        return f"a step was left out on {name_ranks(behind)}", odd
    if len(odd) < len(forwards) and ahead and not behind:
        return f"a step was added on {name_ranks(ahead)}", odd
    return f"a step was left out on {name_ranks(behind)}, or added on {name_ranks(ahead)}", odd
