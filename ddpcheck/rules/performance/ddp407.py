"""DDP407: DDP searches for unused parameters, and there are none."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import is_unwrapped
from ddpcheck.analysis.collectors.needless import NeedlessSyncsCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP407",
    severity=Severity.NOTE,
    title="Unused parameters are searched for, and there are none",
    summary="`find_unused_parameters=True` where every parameter is used, and what the search costs",
    location=Location.WRAPPING,
)

# A branch that is taken now and then does not show in fewer backwards.
LEAST_BACKWARDS = 20
WARNING_SHARE = 0.2
WARNING_US = 1000


def find(context: RuleContext) -> list[Finding]:
    collector = context.attempt.collector(NeedlessSyncsCollector)
    findings = []
    for module in context.modules():
        by_rank = collector.of_all(module)
        if is_unwrapped(module) or not by_rank:
            continue
        searches = min(record.searches for record in by_rank.values())
        if searches < LEAST_BACKWARDS or any(each.all_used < each.searches for each in by_rank.values()):
            continue
        cost_us = max(record.search_us / max(1, record.step) for record in by_rank.values())
        table = context.time_of(module)
        share = cost_us / table.step_us if table is not None and table.step_us else None
        severe = share is not None and share >= WARNING_SHARE and cost_us >= WARNING_US
        of_step = f", {share:.1%} of a step" if share is not None else ""
        findings.append(
            context.finding(
                RULE,
                f"DDP searches for unused parameters, and in {searches} backwards every rank used all of them. The "
                f"search takes {cost_us / 1000:.2f} ms per step{of_step}; in addition, each backward reduces a list of "
                "the parameters that were used.",
                severity=Severity.WARNING if severe else Severity.NOTE,
                module=module,
                ranks=module[0],
                evidence={
                    "backwards": searches,
                    "cost_ms": round(cost_us / 1000, 4),
                    **({"share": round(share, 4)} if share is not None else {}),
                },
                cause="find_unused_parameters=True, and every parameter takes part in every backward",
                fix="Remove find_unused_parameters=True. Keep it if a branch of the model that this run did not take "
                "leaves parameters out.",
            )
        )
    return findings
