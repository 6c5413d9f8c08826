"""DDP209: non-finite gradients, and the rank and parameter they started on."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.allreduce.verify import NonFinite
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord


def find(case: RuleContext) -> list[Finding]:
    """Only what was applied counts: a scaler that sees an overflow leaves the step out, and all is well."""
    return [finding for module in case.attempt.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    ranks = case.attempt.of_module(module)
    applied = {number: rank.nonfinite[module] for number, rank in ranks.items() if module in rank.nonfinite}
    tally = case.attempt.gradients.tallies.get(module)
    if not applied or tally is None or tally.nonfinite is None:
        return []
    step = min(record.step for record in applied.values())
    origin = tally.nonfinite
    rows = next(iter(ranks.values())).latest[module].parameters
    name = rows[origin.place][0]
    trained = sum(bool(row[3]) for row in rows)
    return [
        case.finding(
            "DDP209",
            f"At step {step} gradients with values that are not finite were applied. They began at step {origin.step} "
            f"on {name_ranks(origin.ranks)}, in {name}; the reduction carried them to all ranks.",
            severity=Severity.WARNING,
            module=module,
            step=origin.step,
            stage=Stage.LOCAL.value,
            parameter=name,
            ranks=origin.ranks,
            evidence={
                "values": origin.count,
                "gradients": {"count": origin.gradients, "of": trained},
                "applied_at_step": step,
                "applied_on_ranks": _appliers(case, module, step, applied),
            },
            cause=_cause(origin, name, trained),
            fix="Look at that rank's batch and loss at that step; leave such a step out on all ranks together.",
        )
    ]


def _appliers(
    case: RuleContext, module: ModuleKey, step: int, applied: Mapping[int, AppliedRecord]
) -> list[int]:
    """A rank tells of the gradients it has looked at; those that applied the very same have no less in theirs."""
    parted = case.attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.GRADIENTS).first
    if parted is not None and parted.moment.step <= step:
        return sorted(applied)
    return sorted(number for number in case.attempt.of_module(module) if case.attempt.steps(number) > step)


def _cause(origin: NonFinite, name: str, trained: int) -> str:
    """What comes with the loss is in every gradient; what a layer makes is only in those behind it."""
    if not origin.gradients:
        return "a NaN or an infinity that the reduction itself made: every rank's own gradients were finite"
    told = "a NaN or an infinity in that rank's own backward"
    if origin.gradients >= trained:
        return f"{told}, in all {trained} of its gradients: it came with the loss or the inputs"
    return f"{told}, in {origin.gradients} of its {trained} gradients, and first in that of {name}"
