"""DDP214: ranks accumulate gradients differently."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.collectors.accumulation import AccumulationCollector, AccumulationDifference
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.state import GradientStart
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP214",
    severity=Severity.ERROR,
    title="Ranks accumulate gradients differently",
    summary="a rank starts from old gradients (`zero_grad` skipped), or ranks ran different numbers of backwards",
    needs=(Need.APPLIED_GRADIENTS,),
    location=Location.STEP,
)

# A rank writes nothing about its gradients after a fault in one of these.
_PROBES = ("agent", "backward", "gradients", "gradient_start")
# Numbers of backwards that stay different for fewer steps than this come from the data, not from a setting.
_FEWEST_STEPS = 3
_MOST_RANKS = 16


def find(context: RuleContext) -> list[Finding]:
    return [
        finding
        for module in context.modules()
        for finding in (*_starts(context, module), *_counts(context, module))
    ]


def _observed(rank: RankData) -> bool:
    return not any(fault.probe in _PROBES for fault in rank.faults)


def _starts(context: RuleContext, module: ModuleKey) -> list[Finding]:
    attempt = context.attempt
    until = {
        number: max((count for (key, _), count in rank.steps.items() if key == module), default=0)
        for number, rank in attempt.of_module(module).items()
        if _observed(rank)
    }
    # A rank that never steps the module, as with a sharded step, has nothing to clear.
    differences = attempt.collector(AccumulationCollector).different_starts(
        module, {rank: steps for rank, steps in until.items() if steps}
    )
    if not differences:
        return []
    difference, record = differences[0]
    old = [rank for rank, value in difference.values.items() if value != GradientStart.CLEARED.value]
    cause = f"old gradients on {name_ranks(old)}: zero_grad was skipped there"
    if difference.values[old[0]] == GradientStart.PARTLY_OLD.value:
        cause += " for some parameters"
    return [
        context.finding(
            RULE,
            f"{_when(difference).capitalize()}, the first backward on {name_ranks(old)} started from the gradients "
            f"of the step before, and on the other ranks from cleared ones. DDP averages them, so the old mean is part "
            "of the new one on every rank: replicas agree and are trained with wrong gradients.",
            module=module,
            step=difference.first,
            stage=Stage.LOCAL.value,
            ranks=_outliers(difference),
            evidence={
                "start": _by_value(difference),
                "steps": [difference.first, difference.last],
                "times": len(differences),
                **({"backward_at": record.where} if record.where else {}),
            },
            cause=cause,
            fix="Call optimizer.zero_grad() once per step on every rank, outside of every branch that only some ranks "
            "take, directly before or after the step.",
        )
    ]


def _counts(context: RuleContext, module: ModuleKey) -> list[Finding]:
    attempt = context.attempt
    collector = attempt.collector(AccumulationCollector)
    until = {
        number: attempt.steps(number) for number, rank in attempt.of_module(module).items() if _observed(rank)
    }
    if attempt.joined(module) or context.divergence(module).parameters is not None:
        return []
    for optimizer in collector.optimizers(module):
        differences = collector.different_counts(module, optimizer, until)
        lasting = next((each for each in differences if _lasts(each, until)), None)
        if lasting is not None:
            return [_different_counts(context, module, lasting, len(differences))]
        if differences:
            return [_different_counts(context, module, differences[0], len(differences), Severity.NOTE)]
    return []


def _lasts(difference: AccumulationDifference, until: dict[int, int]) -> bool:
    end = max(until.values()) if difference.last is None else difference.last + 1
    return end - difference.first >= _FEWEST_STEPS


def _different_counts(
    context: RuleContext,
    module: ModuleKey,
    difference: AccumulationDifference,
    times: int,
    severity: Severity = Severity.WARNING,
) -> Finding:
    ranks_by_count = groups_of({rank: str(value) for rank, value in difference.values.items()})
    text = ", ".join(f"{count} on {name_ranks(ranks)}" for count, ranks in ranks_by_count[:4])
    return context.finding(
        RULE,
        f"{_when(difference).capitalize()}, ranks stepped after different numbers of backwards: {text}. "
        "DDP averages over ranks, whatever each of them has accumulated, so their samples have different weights.",
        severity=severity,
        module=module,
        step=difference.first,
        stage=Stage.APPLIED.value,
        ranks=_outliers(difference),
        evidence={
            "backwards": _by_value(difference),
            "steps": [difference.first, difference.last],
            "times": times,
        },
        cause=f"different numbers of backwards per step: {text}",
        fix="Accumulate the same number of micro-batches on every rank. If the numbers must differ, sum the losses "
        "and divide by the number of samples (or tokens) of all ranks, times the world size.",
    )


def _outliers(difference: AccumulationDifference) -> tuple[int, ...]:
    groups = groups_of({rank: str(value) for rank, value in difference.values.items()})
    return outlier_ranks([ranks for _, ranks in groups])


def _by_value(difference: AccumulationDifference) -> dict[str, Any]:
    groups = groups_of({rank: str(value) for rank, value in difference.values.items()})
    return {name_ranks(ranks[:_MOST_RANKS]): value for value, ranks in groups}


def _when(difference: AccumulationDifference) -> str:
    if difference.last is None:
        return f"from step {difference.first} on"
    if difference.last == difference.first:
        return f"in step {difference.first}"
    return f"in steps {difference.first} to {difference.last}"
