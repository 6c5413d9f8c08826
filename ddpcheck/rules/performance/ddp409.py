"""DDP409: every step waits for a barrier, or for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.analysis.collectors.needless import NeedlessSyncsCollector, WaitingSite
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.records.kinds.needless import HostWait
from ddpcheck.rules.rule import Need, Rule

RULE = Rule(
    code="DDP409",
    severity=Severity.NOTE,
    title="Every step waits for a barrier or for the device",
    summary="barriers, `.item()` and device synchronisation in the training loop, and what they cost",
    needs=(Need.TIME,),
)

MOST_SITES = 3
WARNING_SHARE = 0.2
WARNING_US = 1000
# A smaller share of a step in which the host waits for the device is not worth a note.
LEAST_SHARE = 0.01


def find(context: RuleContext) -> list[Finding]:
    collector = context.attempt.collector(NeedlessSyncsCollector)
    findings = []
    for table in context.time:
        if not table.step_us:
            continue
        barriers = collector.waits(table.group, HostWait.BARRIER)
        if barriers and all(barriers.values()):
            findings.append(_barrier(context, table, barriers))
        reads = {
            rank: sites for rank, sites in collector.waits(table.group, HostWait.DEVICE).items() if sites
        }
        if reads and _per_step(reads, most=True) >= LEAST_SHARE * table.step_us:
            findings.append(_device(context, table, reads))
    return findings


def _barrier(context: RuleContext, table: TimeTable, by_rank: Mapping[int, list[WaitingSite]]) -> Finding:
    # The rank that arrives last waits least. What others wait longer is for that rank, and would only move elsewhere.
    cost_us = _per_step(by_rank, most=False)
    share = cost_us / table.step_us
    severe = share >= WARNING_SHARE and cost_us >= WARNING_US
    calls = max(sum(site.calls for site in sites) for sites in by_rank.values())
    return context.finding(
        RULE,
        f"Every step waits in {_times(calls)} at a barrier: {cost_us / 1000:.2f} ms ({_of_step(share, table)}), not "
        "counting the wait for ranks that arrive late.",
        severity=Severity.WARNING if severe else Severity.NOTE,
        stage="barrier",
        ranks=table.group,
        evidence=_evidence(by_rank, cost_us, share),
        cause=f"barrier() is called in the training loop, at {_locations(by_rank)}",
        fix="Remove the barrier: DDP's AllReduce already makes every rank wait for the others, and a training step "
        "needs no other order between ranks.",
    )


def _device(context: RuleContext, table: TimeTable, by_rank: Mapping[int, list[WaitingSite]]) -> Finding:
    waited_us = _per_step(by_rank, most=True)
    share = waited_us / table.step_us
    return context.finding(
        RULE,
        f"In every step the host waits {waited_us / 1000:.2f} ms for the device ({_of_step(share, table)}), at "
        f"{_locations(by_rank)}. While it waits it launches nothing: the device "
        "idles from the end of its work until the next kernel arrives. That gap is the cost; it is at most this "
        "long.",
        severity=Severity.NOTE,
        stage="device",
        ranks=tuple(by_rank),
        evidence=_evidence(by_rank, waited_us, share),
        cause=f"values of device tensors are read, or the device is synchronised, in every step: {_locations(by_rank)}",
        fix="Read values such as the loss every 50 or 100 steps, accumulate them in a tensor on the device, or copy "
        "them with non_blocking=True and read them a step later.",
    )


def _per_step(by_rank: Mapping[int, Sequence[WaitingSite]], most: bool) -> float:
    totals = [sum(site.us for site in sites) for sites in by_rank.values()]
    return max(totals) if most else min(totals)


def _of_step(share: float, table: TimeTable) -> str:
    """Waits are means over some steps, the time of a step is a median over all."""
    step = f"{table.step_us / 1000:.1f} ms"
    return (
        f"{share:.1%} of {step} per step"
        if share <= 1
        else f"a mean over some slow steps; the median is {step}"
    )


def _times(calls: float) -> str:
    return "1 call" if round(calls) <= 1 else f"{calls:.0f} calls"


def _sites(by_rank: Mapping[int, Sequence[WaitingSite]]) -> list[WaitingSite]:
    """The sites with the longest waits, of any rank, one for each line."""
    longest: dict[tuple[str, str], WaitingSite] = {}
    for site in sorted((site for sites in by_rank.values() for site in sites), key=lambda site: -site.us):
        longest.setdefault((site.function, site.where), site)
    return list(longest.values())[:MOST_SITES]


def _locations(by_rank: Mapping[int, Sequence[WaitingSite]]) -> str:
    return ", ".join(
        f"{site.where.rpartition('/')[2] or 'a library'} ({site.function})" for site in _sites(by_rank)
    )


def _evidence(by_rank: Mapping[int, Sequence[WaitingSite]], us: float, share: float) -> dict[str, object]:
    return {
        "wait_ms": round(us / 1000, 4),
        "share": round(share, 4),
        "calls": [
            {
                "function": site.function,
                "where": site.where,
                "calls_per_step": round(site.calls, 2),
                "ms_per_step": round(site.us / 1000, 4),
            }
            for site in _sites(by_rank)
        ],
    }
