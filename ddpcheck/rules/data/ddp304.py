"""DDP304: local gradients are identical on several ranks."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.batches import Sameness, sameness
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.rules.rule import Need, Rule, first_sentence

RULE = Rule(
    code="DDP304",
    severity=Severity.WARNING,
    title="Local gradients are identical on several ranks",
    summary="ranks computed bit-identical gradients",
    needs=(Need.REDUCED_GRADIENTS,),
    headline=first_sentence,
    order=210.3,
)

# A single pair of equal gradients may be chance (a batch of one class, a dead network).
_FEWEST_BACKWARDS = 2


def find(context: RuleContext) -> list[Finding]:
    findings = []
    for module in context.modules():
        checks = context.attempt.gradients.stats.get(module)
        # DDP301 reports equal batches, which explain equal gradients.
        if checks is None or sameness(context.attempt.data.of(module)) is not Sameness.NONE:
            continue
        for ranks, count in sorted(checks.identical.items(), key=lambda item: -item[1])[:1]:
            if count >= _FEWEST_BACKWARDS and 2 * count >= checks.checked:
                findings.append(_finding(context, module, ranks, count, checks.checked))
    return findings


def _finding(
    context: RuleContext, module: ModuleKey, ranks: tuple[int, ...], count: int, checked: int
) -> Finding:
    return context.finding(
        RULE,
        f"{name_ranks(ranks).capitalize()} computed bit-identical gradients in {count} of {checked} backwards. "
        "They duplicate each other's work.",
        module=module,
        stage=Stage.LOCAL.value,
        ranks=ranks,
        evidence={"identical_backwards": count, "checked": checked},
        cause="these ranks train on the same data with the same random numbers",
        fix="Give every rank its own share of the data (DistributedSampler, or a split by rank).",
    )
