"""DDP305: per-rank means over unequal counts weight the samples unequally."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.collectors.loss_form import LossFormCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.batches import TOLERANCE, BatchFingerprints, Counts
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.rules.rule import Rule

RULE = Rule(
    code="DDP305",
    severity=Severity.WARNING,
    title="Ranks averaged over unequal counts of samples or tokens",
    summary="ranks averaged over unequal counts of samples or tokens",
)

_FIX = (
    "Give every rank the same number of samples in each step (a DistributedSampler pads, drop_last=True drops the "
    "rest), or sum the loss, divide by the count of all ranks (all_reduce it) and multiply by the number of ranks."
)
_GROWING_LOSS = (
    " However, the losses grow with these counts, as sums do, or losses divided by the count of all ranks. Then all "
    "samples have the same weight, and nothing is wrong."
)
_WEIGHTED_LOSS = (
    " However, the loss is a sum, or a mean that each rank multiplies by a constant proportional to its count. Then "
    "all samples have the same weight, and nothing is wrong."
)
_MOST_RANKS = 16


def find(context: RuleContext) -> list[Finding]:
    return [finding for module in context.modules_with_forwards() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    # join() exists for unequal inputs.
    if context.attempt.joined(module):
        return []
    inputs = context.attempt.data.of(module)
    if inputs.rows.worst is not None:
        # If sizes change all the time, batches are built by length, or the first dimension is not the batch.
        severity = Severity.WARNING if inputs.rows.regular() else Severity.NOTE
        rows = [_finding(context, module, inputs.rows, inputs.rows.worst, "samples", severity)]
    else:
        rows = []
    if inputs.tokens.worst is not None and not any(row.severity is Severity.WARNING for row in rows):
        return [
            _finding(context, module, inputs.tokens, inputs.tokens.worst, "labelled tokens", Severity.WARNING)
        ]
    if not rows and not inputs.tokens.compared and inputs.attended.worst is not None:
        return [_finding(context, module, inputs.attended, inputs.attended.worst, "tokens", Severity.NOTE)]
    return rows


def _loss_grows(context: RuleContext, module: ModuleKey, counts: Counts) -> bool:
    """Whether losses grow with the counts: they are sums, or divided by the count of all ranks."""
    owners = {
        optimizer
        for rank in context.attempt.ranks.values()
        for optimizer, key in rank.optimizers
        if key == module
    }
    for optimizer in sorted(owners):
        losses = {
            rank: dict(zip(series.steps, series.values, strict=True))
            for (rank, owner), series in context.attempt.losses.items()
            if owner == optimizer
        }
        if counts.losses.grows(losses):
            return True
    return False


def _weighted_by_count(context: RuleContext, counts: dict[int, int]) -> bool:
    """Whether the loss gives all samples the same weight: sums, or means with factors that follow from the counts."""
    weights = context.attempt.collector(LossFormCollector).weights_per_sample(counts)
    if weights.keys() != counts.keys():
        return False
    return min(weights.values()) > 0 and max(weights.values()) < TOLERANCE * min(weights.values())


def _finding(
    context: RuleContext,
    module: ModuleKey,
    counts: Counts,
    worst: BatchFingerprints,
    what: str,
    severity: Severity,
) -> Finding:
    by_rank = {rank: int(count) for rank, count in sorted(worst.values.items())}
    weights = _weights(by_rank)
    weighted = _weighted_by_count(context, by_rank)
    grows = weighted or _loss_grows(context, module, counts)
    most, least = max(by_rank, key=lambda rank: by_rank[rank]), min(by_rank, key=lambda rank: by_rank[rank])
    return context.finding(
        RULE,
        f"At step {worst.step} rank {most} trained on {by_rank[most]} {what} and rank {least} on {by_rank[least]}. "
        f"If each rank's loss is a mean, one of rank {least}'s counted {counts.ratio:.3g} times as much as "
        f"one of rank {most}'s. The counts differed by more than 10 % in {counts.uneven} of {counts.compared} "
        "forwards." + (_WEIGHTED_LOSS if weighted else _GROWING_LOSS if grows else ""),
        severity=Severity.NOTE if grows else severity,
        module=module,
        step=worst.step,
        stage="forward",
        ranks=(least,),
        evidence={
            "counted": what,
            "counts": {str(rank): count for rank, count in list(by_rank.items())[:_MOST_RANKS]},
            "weights": {str(rank): round(weight, 4) for rank, weight in list(weights.items())[:_MOST_RANKS]},
            "forwards": counts.compared,
            "forwards_uneven": counts.uneven,
            "loss_grows_with_count": grows,
            "loss_weighted_by_count": weighted,
        },
        cause=f"losses that are weighted by the number of {what}"
        if weighted
        else f"losses that grow with the number of {what}: sums, or divided by the count of all ranks"
        if grows
        else f"DDP averages over ranks, regardless of the number of {what} behind each gradient",
        fix="Nothing, if the loss is computed like that." if grows else _FIX,
    )


def _weights(counts: dict[int, int]) -> dict[int, float]:
    """The weight of one sample of each rank, relative to equal weights."""
    mean = sum(counts.values()) / len(counts)
    return {rank: mean / count for rank, count in counts.items()}
