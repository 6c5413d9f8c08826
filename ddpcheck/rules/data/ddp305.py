"""DDP305: per-rank means over unequal counts weight the samples unequally."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.batches import BatchFingerprints, Counts
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey

FIX = (
    "Give every rank as many samples in each step (a DistributedSampler pads, drop_last=True leaves the rest "
    "out), or sum the loss, divide by the count of all ranks (all_reduce it) and multiply by their number."
)
SHARED = (
    " But losses grow with these counts, as sums do, and what is divided by the count of all ranks: then all weigh "
    "the same, and nothing is wrong."
)
MOST_TOLD = 16


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    # Inside join() ranks are meant to have unequal inputs.
    if case.attempt.joined(module):
        return []
    seen = case.attempt.data.of(module)
    if seen.rows.worst is not None:
        # Where sizes change all the time, batches are made by length, or the first dimension is no batch.
        severity = Severity.WARNING if seen.rows.regular() else Severity.NOTE
        rows = [_finding(case, module, seen.rows, seen.rows.worst, "samples", severity)]
    else:
        rows = []
    if seen.tokens.worst is not None and not any(row.severity is Severity.WARNING for row in rows):
        return [_finding(case, module, seen.tokens, seen.tokens.worst, "labelled tokens", Severity.WARNING)]
    if not rows and not seen.tokens.compared and seen.attended.worst is not None:
        return [_finding(case, module, seen.attended, seen.attended.worst, "tokens", Severity.NOTE)]
    return rows


def _shared(case: RuleContext, module: ModuleKey, counts: Counts) -> bool:
    """Whether ranks' losses grow with their counts: they are sums then, or divided by the count of all ranks."""
    owners = {
        optimizer
        for rank in case.attempt.ranks.values()
        for optimizer, key in rank.optimizers
        if key == module
    }
    for optimizer in sorted(owners):
        losses = {
            rank: dict(zip(book.steps, book.values, strict=True))
            for (rank, of), book in case.attempt.losses.items()
            if of == optimizer
        }
        if counts.losses.grows(losses):
            return True
    return False


def _finding(
    case: RuleContext,
    module: ModuleKey,
    counts: Counts,
    worst: BatchFingerprints,
    what: str,
    severity: Severity,
) -> Finding:
    said = {rank: int(count) for rank, count in sorted(worst.values.items())}
    weights = weights_of(said)
    shared = _shared(case, module, counts)
    most, least = max(said, key=lambda rank: said[rank]), min(said, key=lambda rank: said[rank])
    return case.finding(
        "DDP305",
        f"At step {worst.step} rank {most} trained on {said[most]} {what} and rank {least} on {said[least]}. "
        f"If each rank's loss is a mean, one of rank {least}'s counted {counts.ratio:.3g} times as much as "
        f"one of rank {most}'s. Shares differed by more than a tenth in {counts.uneven} of {counts.compared} "
        "forwards." + (SHARED if shared else ""),
        severity=Severity.NOTE if shared else severity,
        module=module,
        step=worst.step,
        stage="forward",
        ranks=(least,),
        evidence={
            "counted": what,
            "counts": {str(rank): count for rank, count in list(said.items())[:MOST_TOLD]},
            "weights": {str(rank): round(weight, 4) for rank, weight in list(weights.items())[:MOST_TOLD]},
            "forwards": counts.compared,
            "forwards_uneven": counts.uneven,
            "loss_grows_with_count": shared,
        },
        cause=f"losses that grow with the number of {what}: sums, or divided by the count of all ranks"
        if shared
        else f"DDP averages over ranks, whatever the number of {what} behind each gradient",
        fix="Nothing, if the loss is made like that." if shared else FIX,
    )


def weights_of(counts: dict[int, int]) -> dict[int, float]:
    """What one sample of each rank weighs, against 1 if all weighed the same."""
    mean = sum(counts.values()) / len(counts)
    return {rank: mean / count for rank, count in counts.items()}
