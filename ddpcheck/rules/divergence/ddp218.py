"""DDP218: ranks weight their gradients differently."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from ddpcheck.analysis.aggregate.agreement import outlier_ranks
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.collectors.accumulation import AccumulationCollector
from ddpcheck.analysis.collectors.loss_form import LossDifference, LossFormCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.rules.rule import Location, Need, Rule, first_sentence

RULE = Rule(
    code="DDP218",
    severity=Severity.WARNING,
    title="Ranks weight their gradients differently",
    summary="a rank's gradients are zero, or count several times as much as those of others: sum and mean, a factor",
    needs=(Need.REDUCED_GRADIENTS,),
    location=Location.STEP,
    headline=first_sentence,
)

# Counts of samples whose ratio is below this are equal.
_EQUAL_COUNTS = 1.1
# How far the ratio of losses may be from that of gradients, as a power of two.
_SAME_FACTOR = 0.35
_FEWEST_LOSSES = 8
_REDUCTIONS = {"mean": "a mean over the batch", "sum": "a sum over the batch", "none": "not reduced"}


def find(context: RuleContext) -> list[Finding]:
    findings = []
    silent_ranks: set[int] = set()
    differences = _loss_differences(context)
    for module in context.modules():
        stats = context.attempt.gradients.stats.get(module)
        if stats is None or module in context.attempt.gradients.joined:
            continue
        silent = stats.weights.silent()
        if silent:
            silent_ranks.update(silent)
            findings.append(_of_silence(context, module, silent, stats.weights.backwards))
        elif (
            not differences and not _counts_differ(context, module) and not _backwards_differ(context, module)
        ):
            findings += [
                finding
                for rank, factor in stats.weights.factors().items()
                if (finding := _of_factor(context, module, rank, factor, stats.weights.backwards))
            ]
    return findings + [
        _of_loss(context, difference)
        for difference in differences
        # Zeros explain why their loss is another one.
        if not silent_ranks or not silent_ranks >= set(outlier_ranks(difference.groups()))
    ]


def _loss_differences(context: RuleContext) -> list[LossDifference]:
    findings = context.attempt.collector(LossFormCollector).differences()
    return [
        difference
        for difference in findings
        if len(set(difference.reductions.values())) > 1
        # A mean over fewer samples may have a smaller factor, so that all samples count alike, and so may the mean of
        # more micro-batches (DDP214).
        or not any(
            _counts_differ(context, module) or _backwards_differ(context, module)
            for module in context.modules_with_forwards()
        )
    ]


def _counts_differ(context: RuleContext, module: ModuleKey) -> bool:
    data = context.attempt.data.of(module)
    return any(counts.ratio > _EQUAL_COUNTS for counts in (data.rows, data.tokens, data.attended))


def _backwards_differ(context: RuleContext, module: ModuleKey) -> bool:
    """Whether ranks stepped after different numbers of backwards."""
    attempt = context.attempt
    collector = attempt.collector(AccumulationCollector)
    until = {number: attempt.steps(number) for number in attempt.of_module(module)}
    return any(
        collector.different_counts(module, optimizer, until) for optimizer in collector.optimizers(module)
    )


def _of_loss(context: RuleContext, difference: LossDifference) -> Finding:
    groups = difference.groups()
    ranks = outlier_ranks(groups)
    by_reduction = len(set(difference.reductions.values())) > 1
    values = {
        name_ranks(members): _REDUCTIONS.get(
            difference.reductions[members[0]], difference.reductions[members[0]]
        )
        if by_reduction
        else f"multiplied by {difference.factors[members[0]]:.6g}"
        for members in groups
    }
    cause = "the loss is " + "; ".join(f"{value} on {members}" for members, value in values.items())
    where = {name_ranks(members): difference.where.get(members[0], "") for members in groups}
    if by_reduction:
        fix = "Reduce the loss in the same way on every rank: use one value of `reduction`, from one configuration."
    else:
        fix = (
            "Use the same factor on every rank. With gradient accumulation, divide by the number of micro-batches that "
            "the rank really accumulates."
        )
    return context.finding(
        RULE,
        f"From step {difference.step} on, {cause}. DDP averages the gradients with equal weights, so samples of some "
        "ranks count more than those of others.",
        step=difference.step,
        stage=Stage.LOCAL.value,
        ranks=ranks,
        evidence={
            "function": difference.function,
            "by_rank": values,
            "factors": {name_ranks(members): difference.factors[members[0]] for members in groups},
            "backward_at": where,
        },
        cause=cause,
        fix=fix,
    )


def _of_silence(context: RuleContext, module: ModuleKey, ranks: tuple[int, ...], backwards: int) -> Finding:
    world = len(module[0])
    return context.finding(
        RULE,
        f"All gradients of {name_ranks(ranks)} were zero in nearly all of {backwards} backwards. DDP divides the sum "
        f"by {world} all the same: their data do not count, and "
        f"each mean is {(world - len(ranks)) / world:.3g} of what it should be.",
        module=module,
        stage=Stage.LOCAL.value,
        ranks=ranks,
        evidence={"backwards": backwards, "ranks_that_contribute": world - len(ranks)},
        cause=f"the loss of {name_ranks(ranks)} does not depend on the parameters: a weight of zero, a mask that "
        "leaves nothing, or an output that is detached",
        fix="Look at the masks, weights and labels of this rank. If it is meant to contribute nothing, leave it out of "
        "the process group of the wrapper.",
    )


def _of_factor(
    context: RuleContext, module: ModuleKey, rank: int, factor: float, backwards: int
) -> Finding | None:
    """Statistics alone: a note, because samples of another size look the same.

    Reported only if the losses agree, or differ by the same factor.
    """
    loss = _loss_factor(context, rank)
    if loss is None:
        return None
    of_loss = abs(math.log2(loss / factor)) < _SAME_FACTOR
    if not of_loss and abs(math.log2(loss)) > _SAME_FACTOR:
        return None
    evidence: dict[str, Any] = {
        "gradients": round(factor, 2),
        "losses": round(loss, 3),
        "backwards": backwards,
    }
    if of_loss:
        cause = (
            f"the loss of rank {rank}, too, is about {loss:.2g} times that of others: a sum, a weight, a divisor, or "
            "samples of another kind"
        )
        more = ""
    else:
        cause = (
            f"hooks of rank {rank} scale its gradients, or its samples vary less than those of other ranks"
        )
        more = " Its losses are as large as those of others."
    return context.finding(
        RULE,
        f"The gradients of rank {rank} are about {factor:.2g} times as large as those of the others: of every "
        f"parameter, and from the first step on.{more}",
        severity=Severity.NOTE,
        module=module,
        step=0,
        stage=Stage.LOCAL.value,
        ranks=(rank,),
        evidence=evidence,
        cause=cause,
        fix="Compare how this rank computes and scales its loss and its gradients with the others.",
    )


def _loss_factor(context: RuleContext, rank: int) -> float | None:
    """The median of a rank's loss divided by that of the other ranks, in the first steps."""
    for optimizer in sorted({owner for _, owner in context.attempt.losses}):
        by_rank = {
            number: dict(zip(series.steps, series.values, strict=True))
            for (number, owner), series in context.attempt.losses.items()
            if owner == optimizer
        }
        own = by_rank.pop(rank, {})
        ratios = []
        for step, value in sorted(own.items()):
            others = [losses[step] for losses in by_rank.values() if losses.get(step)]
            middle = median(others) if others else 0.0
            if value > 0 and middle > 0 and math.isfinite(value) and math.isfinite(middle):
                ratios.append(value / middle)
        if len(ratios) >= _FEWEST_LOSSES:
            return median(ratios)
    return None
