"""DDP209: non-finite gradients, and the rank and parameter they started on."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.allreduce.collector import NonFinite
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.rules.rule import Location, Rule, first_sentence

RULE = Rule(
    code="DDP209",
    severity=Severity.WARNING,
    title="Non-finite gradients were applied",
    summary="gradients with NaN or infinity were applied: the rank and parameter of origin",
    location=Location.STEP,
    headline=first_sentence,
    order=210.6,
)

_FIX = "Check that rank's batch and loss at that step. Skip such a step on all ranks together."
_FIX_IN_REDUCTION = (
    "If the gradients are float16, or a communication hook makes them so, their sum over all ranks exceeds its range: "
    "reduce in float32 or bfloat16, lower the loss scale, or divide before the sum. Otherwise suspect the network or "
    "the memory of a rank."
)


def find(context: RuleContext) -> list[Finding]:
    """Only applied gradients count: a gradient scaler that detects an overflow skips the step."""
    return [finding for module in context.attempt.modules() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    ranks = context.attempt.of_module(module)
    applied = {number: rank.nonfinite[module] for number, rank in ranks.items() if module in rank.nonfinite}
    checks = context.attempt.gradients.stats.get(module)
    if not applied or checks is None or checks.nonfinite is None:
        return []
    step = min(record.step for record in applied.values())
    origin = checks.nonfinite
    rows = next(iter(ranks.values())).latest[module].parameters
    name = rows[origin.index][0]
    trained = sum(bool(row[3]) for row in rows)
    # Gradients may have had such values before, at a step that was not searched.
    searched = context.attempt.collector(CostCollector).intervals_at(origin.step)[0] == 1
    appeared = (
        f"They first appeared at step {origin.step} on"
        if searched
        else f"Not every step is searched; they were first seen at step {origin.step} on"
    )
    # Finite gradients whose sum is not: no rank is at fault.
    in_reduction = not origin.gradients
    where = "the reduction" if in_reduction else name_ranks(origin.ranks)
    spread = "" if in_reduction else "; the reduction spread them to all ranks"
    appeared = appeared.removesuffix(" on") + (" in" if in_reduction else " on")
    return [
        context.finding(
            RULE,
            f"At step {step} gradients with NaN or infinity were applied. {appeared} {where}, in {name}{spread}.",
            module=module,
            step=origin.step,
            stage=(Stage.REDUCED if in_reduction else Stage.LOCAL).value,
            parameter=name,
            ranks=origin.ranks,
            evidence={
                "values": origin.count,
                "gradients": {"count": origin.gradients, "of": trained},
                "applied_at_step": step,
                "applied_on_ranks": _ranks_that_applied(context, module, step, applied),
            },
            cause=_cause(origin, name, trained),
            fix=_FIX_IN_REDUCTION if in_reduction else _FIX,
        )
    ]


def _ranks_that_applied(
    context: RuleContext, module: ModuleKey, step: int, applied: Mapping[int, AppliedRecord]
) -> list[int]:
    """Each rank inspects only its share of the gradients, but ranks that agree applied the same values."""
    first = context.attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.GRADIENTS).first
    if first is not None and first.key.step <= step:
        return sorted(applied)
    return sorted(
        number for number in context.attempt.of_module(module) if context.attempt.steps(number) > step
    )


def _cause(origin: NonFinite, name: str, trained: int) -> str:
    """A bad loss affects every gradient; a bad layer affects only those behind it."""
    if not origin.gradients:
        return "a NaN or an infinity that the reduction itself produced: every rank's local gradients were finite"
    text = "a NaN or an infinity in that rank's own backward"
    if origin.gradients >= trained:
        return f"{text}, in all {trained} of its gradients: it comes from the loss or the inputs"
    return f"{text}, in {origin.gradients} of its {trained} gradients, first in that of {name}"
