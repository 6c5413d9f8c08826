"""DDP212: an optimizer stepped shards without their gradients."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.sharding.collector import PendingGradientsCollector, PendingSteps
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.shards import PendingReason
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP212",
    severity=Severity.ERROR,
    title="Shards were stepped without their gradients",
    summary="an optimizer stepped shards whose gradients were not reduced yet, so nothing was applied",
    live=True,
    location=Location.STEP,
)

_CAUSES = {
    PendingReason.SYNC_OFF.value: "set_requires_gradient_sync(False) is still in effect",
    PendingReason.ALL_REDUCE_OFF.value: "set_requires_all_reduce(False) is still in effect",
}
_FIXES = {
    PendingReason.SYNC_OFF.value: "Call set_requires_gradient_sync(True) before the backward of the last micro-batch "
    "of each step.",
    PendingReason.ALL_REDUCE_OFF.value: "Call set_requires_all_reduce(True) before the backward of the last "
    "micro-batch of each step.",
}


def find(context: RuleContext) -> list[Finding]:
    pending = context.attempt.collector(PendingGradientsCollector).by_reason()
    return [_finding(context, steps) for steps in pending]


def _finding(context: RuleContext, pending: PendingSteps) -> Finding:
    record = pending.first
    more = f" and {record.count - 1} more parameters" if record.count > 1 else ""
    cause = _CAUSES.get(record.reason, "FSDP does not reduce their gradients")
    name = record.parameters[0] if record.parameters else "?"
    times = "1 step" if record.steps == 1 else f"{record.steps} steps"
    return context.finding(
        RULE,
        f"From step {record.step} on, the optimizer steps {name}{more} without a gradient ({times}): FSDP keeps the "
        "gradients of each rank and has not reduced them. These parameters do not change, and replicas stay equal.",
        step=record.step,
        stage=Stage.APPLIED.value,
        parameter=name,
        ranks=pending.ranks,
        evidence={
            "steps_without_gradient": record.steps,
            "parameters_without_gradient": record.count,
            "names": record.parameters,
            "where": record.where,
        },
        cause=cause,
        fix=_FIXES.get(record.reason, "Let FSDP reduce gradients before the step."),
    )
