"""DDP403: a link or a node's card gives less than the others while it is asked, and the ring waits for it."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.network.infiniband import SlowPort
from ddpcheck.analysis.network.model import Cost, NodeLink, SlowLink, cost_of
from ddpcheck.formatting import megabits_text

# Of a step: below, nobody would notice the link.
LEAST_SHARE = 0.05
MOST_TOLD = 8

NODE = (
    "the card, cable, switch port or driver of that node, a limit set there, or other traffic over its link"
)
DIRECTION = (
    "one direction of the link between them, or other traffic on its way: which end it is cannot be told"
)
FIX = (
    "Compare speed, duplex, MTU and errors of the card with those of the other nodes (ethtool, ip -s link), then the "
    "cable and the switch port, and look for what else sends there. `ddpcheck links` measures every link on its own."
)
PORT_CAUSES = {
    "rate": "the port runs below its rate: a bad cable or connector, fewer lanes, or another rate set at the switch",
    "errors": "a bad cable or connector: what arrives broken is sent again",
    "waiting": "what lies behind that port takes its data too slowly: the switch, a cable further on, or a receiver",
}
PORT_FIX = (
    "Look at the port with ibstat and perfquery, reseat or exchange the cable, and compare the switch port."
)


def find(case: RuleContext) -> list[Finding]:
    if case.links is None:
        return []
    found = []
    if case.links.slow is not None:
        found.append(_slow_link(case, case.links.slow, cost_of(case.links.slow, case.time)))
    if case.links.slow_port is not None:
        found.append(_slow_port(case, case.links.slow_port))
    return found


def _slow_link(case: RuleContext, slow: SlowLink, cost: Cost | None) -> Finding:
    hidden = cost is not None and cost.share < LEAST_SHARE
    return case.finding(
        "DDP403",
        f"{_named(slow)} gave {megabits_text(slow.bandwidth)} while asked, the links between the others "
        f"{megabits_text(slow.usual)} (median): {slow.factor:.2g} times as much. {_costs(cost)}",
        severity=Severity.NOTE if hidden else Severity.WARNING,
        stage="backward",
        ranks=_ranks(case, slow.nodes),
        evidence={
            "nodes": list(slow.nodes),
            "megabits": round(slow.bandwidth * 8e-6, 1),
            "usual_megabits": round(slow.usual * 8e-6, 1),
            "factor": round(slow.factor, 2),
            "cost_ms": None if cost is None else round(cost.cost_us / 1000, 3),
            "step_ms": None if cost is None else round(cost.step_us / 1000, 3),
            "links": [_told(link) for link in slow.links[:MOST_TOLD]],
        },
        cause=NODE if len(slow.nodes) == 1 else DIRECTION,
        fix=FIX,
    )


def _named(slow: SlowLink) -> str:
    if len(slow.nodes) == 1:
        which = f" at {slow.address}" if slow.address else ""
        return f"{slow.nodes[0]}{which}, to and from the other nodes,"
    return f"The link from {slow.nodes[0]} to {slow.nodes[1]}"


def _costs(cost: Cost | None) -> str:
    if cost is None:
        return "What it costs is not known: no step was clocked."
    of = f"{cost.cost_us / 1000:.1f} ms of a step's {cost.step_us / 1000:.1f} ms"
    if cost.share < LEAST_SHARE:
        return f"It costs no more than {of}: the rest hides behind the backward."
    return f"It costs {of} ({100 * cost.share:.0f} %) on every rank."


def _told(link: NodeLink) -> dict[str, Any]:
    return {
        "from": link.source,
        "to": link.target,
        "megabits": round(link.bandwidth * 8e-6, 1),
        "busy_pct": round(100 * link.busy_share),
        "sent_again": link.retransmits,
    }


def _slow_port(case: RuleContext, slow: SlowPort) -> Finding:
    port = slow.port
    said = {
        "rate": f"runs at {slow.own / 1000:g} Gbit/s, those of the others at {slow.usual / 1000:g} (median)",
        "errors": f"counted {slow.own:.0f} errors while the job ran, those of the others {slow.usual:.0f} (median)",
        "waiting": f"had data and could not send {_more(slow)} as often for each byte as those of the others",
    }
    return case.finding(
        "DDP403",
        f"InfiniBand port {port.name} of {port.node} {said[slow.why]}. "
        f"It sent {port.sent / 1e6:.0f} MB in {port.seconds:.1f} s.",
        # Waiting is a symptom, and may be another port's doing.
        severity=Severity.NOTE if slow.why == "waiting" else Severity.WARNING,
        stage="backward",
        ranks=_ranks(case, (port.node,)),
        evidence={
            "nodes": [port.node],
            "port": port.name,
            "rate_mbit": port.speed,
            "errors": port.errors,
            "waited_ticks": port.waited,
        },
        cause=PORT_CAUSES[slow.why],
        fix=PORT_FIX,
    )


def _more(slow: SlowPort) -> str:
    return f"{slow.own / slow.usual:.0f} times" if slow.usual else "many times"


def _ranks(case: RuleContext, nodes: tuple[str, ...]) -> tuple[int, ...]:
    known = case.links.ranks if case.links is not None else {}
    return tuple(sorted(rank for node in nodes for rank in known.get(node, ())))
