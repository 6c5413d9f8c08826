"""DDP217: a rank computed a gradient that other ranks cannot reproduce."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.audit.collector import AuditCollector, AuditStats
from ddpcheck.analysis.audit.judgement import OutlierDevice, judge
from ddpcheck.analysis.collectors.devices import DeviceCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import counted, name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP217",
    severity=Severity.ERROR,
    title="A gradient could not be reproduced on other ranks",
    summary="a rank computed a gradient that other ranks cannot reproduce (`--audit`)",
    location=Location.SCRIPT,
    # Its cause comes before wrong values that other rules find.
    order=200.5,
)

_MOST_NAMED = 8


def find(context: RuleContext) -> list[Finding]:
    stats = context.attempt.collector(AuditCollector).stats
    return [
        _finding(context, module, of_module, outlier)
        for module, of_module in stats.items()
        for outlier in judge(of_module).outliers
    ]


def _finding(context: RuleContext, module: ModuleKey, stats: AuditStats, outlier: OutlierDevice) -> Finding:
    ranks = context.attempt.of_module(module)
    names = [str(row[0]) for row in next(iter(ranks.values())).latest[module].parameters]
    differences = outlier.differences()
    rows = sorted({index for each in differences for index in each.parameters if index < len(names)})
    in_forward = any(each.outputs for each in differences)
    own = [each for each in differences if each.source in outlier.ranks]
    replays = len({voter for each in own for voter in each.voters} - set(outlier.ranks))
    distances = [each.distance for each in differences]
    known = [distance for distance in distances if distance is not None]
    step = outlier.first.step
    where = ", ".join(_device(context, rank) for rank in outlier.ranks)
    what = f"the gradient of {counted(len(rows), 'parameter')}" if rows else "the output of its forward"
    if outlier.certain:
        why = (
            f"{counted(replays, 'other rank')} computed the same other values from the same inputs"
            if replays
            else "other ranks agree on what they computed for their micro-batches, and this one does not"
        )
        message = f"At step {step} {name_ranks(outlier.ranks)} ({where}) computed {what} wrongly: {why}."
        cause = f"the device or the memory of {name_ranks(outlier.ranks)} gave wrong values in the " + (
            "forward" if in_forward else "backward"
        )
    else:
        message = (
            f"At step {step} {name_ranks(outlier.ranks)} ({where}) computed {what} differently from the same inputs. "
            "Two ranks cannot outvote each other."
        )
        cause = f"the device or the memory of one of {name_ranks(outlier.ranks)} gives wrong values"
    return context.finding(
        RULE,
        message,
        module=module,
        step=step,
        stage=Stage.LOCAL.value,
        # Gradients flow from the last parameters to the first: the fault lies at the last one that differs, or later.
        parameter=names[rows[-1]] if rows else None,
        ranks=outlier.ranks,
        evidence={
            "steps": [each.step for each in outlier.rounds[:_MOST_NAMED]],
            "parameters": [names[row] for row in rows[:_MOST_NAMED]],
            "parameters_differing": len(rows),
            "outputs_differ": in_forward,
            "largest_relative_difference": max(known, default=None)
            if len(known) == len(distances)
            else "not finite",
            "lasting": outlier.lasting,
            "devices": {str(rank): _facts(context, rank) for rank in outlier.ranks},
            "audits": {"steps": stats.rounds, "agreeing": stats.agreeing},
        },
        cause=cause,
        fix=f"Take {where} out of the job, test its memory and arithmetic with the diagnostics of its vendor (for "
        f"NVIDIA GPUs `dcgmi diag -r 3`), and continue from a checkpoint before step {step}. "
        "Audit more often to see whether it happens again.",
    )


def _facts(context: RuleContext, rank: int) -> dict[str, str]:
    data = context.attempt.ranks.get(rank)
    facts = {"host": data.header.host, "device": data.header.device} if data is not None else {}
    for record in context.attempt.collector(DeviceCollector).devices.get(rank, ())[:1]:
        facts.update(device=record.device, name=record.name, uuid=record.uuid)
    return {key: value for key, value in facts.items() if value}


def _device(context: RuleContext, rank: int) -> str:
    facts = _facts(context, rank)
    return " ".join(
        part
        for part in (facts.get("device", "cpu"), facts.get("uuid", ""), "on", facts.get("host", ""))
        if part
    )
