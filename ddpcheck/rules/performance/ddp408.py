"""DDP408: forwards of an evaluation broadcast the buffers of the module."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import is_unwrapped
from ddpcheck.analysis.collectors.needless import NeedlessSyncsCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP408",
    severity=Severity.NOTE,
    title="Each forward of an evaluation broadcasts the buffers",
    summary="evaluations with gradients enabled: DDP broadcasts buffers before each forward, and what that costs",
    location=Location.WRAPPING,
)

LEAST_FORWARDS = 8
WARNING_SHARE = 0.2
WARNING_US = 1000


def find(context: RuleContext) -> list[Finding]:
    collector = context.attempt.collector(NeedlessSyncsCollector)
    findings = []
    for module in context.modules():
        by_rank = collector.of_all(module)
        if is_unwrapped(module) or not by_rank:
            continue
        forwards = min(record.evaluations for record in by_rank.values())
        if forwards < LEAST_FORWARDS:
            continue
        # The rank that waits least: waiting for a rank that arrives late is not the cost of the broadcast.
        record = min(by_rank.values(), key=lambda each: each.broadcast_us / max(1, each.evaluations))
        each_us = record.broadcast_us / record.evaluations
        cost_us = record.broadcast_us / max(1, record.step)
        table = context.time_of(module)
        share = cost_us / table.step_us if table is not None and table.step_us else None
        severe = share is not None and share >= WARNING_SHARE and cost_us >= WARNING_US
        of_step = f", {share:.1%} of a step" if share is not None else ""
        findings.append(
            context.finding(
                RULE,
                f"{forwards} forwards in evaluation mode ran with gradients enabled and had no backward: before each, "
                f"DDP broadcast all buffers in {each_us / 1000:.2f} ms. Spread over the training steps this is "
                f"{cost_us / 1000:.2f} ms per step{of_step}. The forwards also kept activations for a backward.",
                severity=Severity.WARNING if severe else Severity.NOTE,
                module=module,
                stage="buffers",
                ranks=module[0],
                evidence={
                    "forwards": forwards,
                    "broadcast_ms": round(each_us / 1000, 4),
                    "cost_ms": round(cost_us / 1000, 4),
                    **({"share": round(share, 4)} if share is not None else {}),
                    "where": record.where,
                },
                cause="the evaluation calls the DDP module without torch.no_grad()",
                fix="Evaluate inside `with torch.no_grad():`, where DDP broadcasts at most once, or call "
                "`model.module`.",
            )
        )
    return findings
