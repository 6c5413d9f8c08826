"""DDP406: gradients are reduced more than once per step."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_unwrapped
from ddpcheck.analysis.collectors.accumulation import AccumulationCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP406",
    severity=Severity.WARNING,
    title="Gradients are reduced more than once per step",
    summary="gradients are reduced at every micro-batch instead of once per step, and what that costs",
    needs=(Need.TIME,),
    location=Location.WRAPPING,
)

# Share of a step, and microseconds per step, from which on superfluous reductions are a note, and a warning.
_NOTE_SHARE = 0.05
_WARNING_SHARE = 0.2
_WARNING_US = 1000


def find(context: RuleContext) -> list[Finding]:
    collector = context.attempt.collector(AccumulationCollector)
    findings = []
    for module in context.modules():
        table = context.time_of(module)
        if table is None or is_unwrapped(module):
            continue
        times = max((_times(collector, module, each) for each in collector.optimizers(module)), default=1)
        if times > 1:
            findings += _judge(context, module, table, times)
    return findings


def _times(collector: AccumulationCollector, module: ModuleKey, optimizer: int) -> int:
    """Reductions per step in most steps; 1 if there is no such number."""
    counts = collector.reduced.get((module, optimizer))
    if not counts:
        return 1
    times, steps = counts.most_common(1)[0]
    return times if 2 * steps > counts.total() else 1


def _judge(context: RuleContext, module: ModuleKey, table: TimeTable, times: int) -> list[Finding]:
    # Each reduction of a step has the same size. Waiting for stragglers is not part of the cost: it would remain.
    share = table.scaling.exposed_communication * (times - 1) / times
    cost_us = share * table.step_us
    if share < _NOTE_SHARE:
        return []
    severe = share >= _WARNING_SHARE and cost_us >= _WARNING_US
    return [
        context.finding(
            RULE,
            f"DDP reduces all gradients {times} times per step. Without the first {times - 1}, a step should take "
            f"{cost_us / 1000:.1f} ms less, {share:.0%} of {table.step_us / 1000:.1f} ms: that is their part of the "
            "communication that no computation hides.",
            severity=Severity.WARNING if severe else Severity.NOTE,
            module=module,
            stage="wait",
            ranks=module[0],
            evidence={
                "reductions_per_step": times,
                "cost_ms": round(cost_us / 1000, 3),
                "share": round(share, 4),
                "step_ms": round(table.step_us / 1000, 3),
            },
            cause=f"{times} backwards per step, each reduced: gradients accumulate without no_sync()",
            fix="Run forward and backward of all micro-batches but the last inside `with model.no_sync():`. Leave it "
            "as it is if the code needs the mean of each micro-batch, for example to clip it.",
        )
    ]
