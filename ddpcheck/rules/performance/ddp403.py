"""DDP403: a link between nodes, or a node's network card, has a lower throughput than the others."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.network.link_bound import LinkBound, link_bound
from ddpcheck.analysis.network.model import Cost, NodeLink, SlowLink, cost_of
from ddpcheck.analysis.network.slow_link import SlowPort
from ddpcheck.formatting import megabits_text
from ddpcheck.rules.rule import Need, Rule, first_sentence

RULE = Rule(
    code="DDP403",
    severity=Severity.WARNING,
    title="A link between nodes is slow",
    summary="a link between nodes is slow: which node, its throughput and that of the others, and the cost per step",
    needs=(Need.LINKS,),
    headline=first_sentence,
    # A slow link explains a straggler.
    order=401.5,
)

# Share of a step below which the link does not matter.
_LEAST_SHARE = 0.05
_MOST_LINKS = 8

_NODE = (
    "the card, cable, switch port or driver of that node, a limit set there, or other traffic over its link"
)
_DIRECTION = (
    "one direction of the link between them, or other traffic on its route; the data does not show which end"
)
_FIX = (
    "Compare speed, duplex, MTU and errors of the card with those of the other nodes (ethtool, ip -s link), then the "
    "cable and the switch port, and look for other traffic. `ddpcheck links` measures every link separately."
)
_BOUND_FIX = (
    "Move fewer bytes per step: accumulate gradients under no_sync, reduce in bf16 (bf16_compress_hook), or shard so "
    "that most traffic stays inside a node. Or use a faster network."
)
_BELOW_FIX = (
    "Measure the link without the job (`ddpcheck links`), check which interface the backend uses (GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME), and with NCCL use several connections (NCCL_NSOCKS_PERTHREAD, NCCL_SOCKET_NTHREADS). Then "
    "move fewer bytes per step."
)
_PORT_CAUSES = {
    "rate": "the port runs below its rate: a bad cable or connector, fewer lanes, or a lower rate set at the switch",
    "errors": "a bad cable or connector: damaged packets are retransmitted",
    "waiting": "the other side of that port accepts data too slowly: the switch, another cable, or a receiver",
}
_PORT_FIX = (
    "Check the port with ibstat and perfquery, reseat or replace the cable, and compare the switch port."
)


def find(context: RuleContext) -> list[Finding]:
    if context.links is None:
        return []
    findings = []
    if context.links.slow is not None:
        findings.append(_slow_link(context, context.links.slow, cost_of(context.links.slow, context.time)))
    if context.links.slow_port is not None:
        findings.append(_slow_port(context, context.links.slow_port))
    if not findings:
        bound = link_bound(context.links.links, context.links.cards, context.time)
        findings += [] if bound is None else [_bound(context, bound)]
    return findings


def _bound(context: RuleContext, bound: LinkBound) -> Finding:
    """No link is slower than the others, and still the way between the nodes is what a step waits for."""
    link = bound.link
    return context.finding(
        RULE,
        f"Communication-bound: the AllReduce moves {bound.bytes_a_step / 1e6:.1f} MB per step from {link.source} to "
        f"{link.target}{_over(bound)} at {megabits_text(link.bandwidth)}{_of_the_rate(bound)}. A step takes "
        f"{bound.step_us / 1000:.1f} ms, {bound.factor:.2g} times as long as without these transfers."
        + _expectation(bound),
        severity=Severity.NOTE,
        stage="backward",
        ranks=_ranks(context, link.ends),
        evidence={
            "nodes": list(link.ends),
            "interface": None if bound.card is None else bound.card.name,
            "card_megabits": None if bound.card is None else bound.card.speed,
            "megabits": round(link.bandwidth * 8e-6, 1),
            "bytes_a_step": round(bound.bytes_a_step),
            "busy_ms": round(bound.busy_us / 1000, 3),
            "exposed_ms": round(bound.exposed_us / 1000, 3),
            "step_ms": round(bound.step_us / 1000, 3),
            "factor": round(bound.factor, 2),
            "expected_ms": {f"{rate:g}": round(us / 1000, 3) for rate, us in bound.expected_us.items()},
            "sent_again": link.retransmits,
        },
        cause=_bound_cause(bound),
        fix=_BOUND_FIX if bound.at_its_rate else _BELOW_FIX,
    )


def _over(bound: LinkBound) -> str:
    return "" if bound.card is None else f" over {bound.card.name}"


def _of_the_rate(bound: LinkBound) -> str:
    if bound.card is None or bound.card.speed is None or bound.of_the_rate is None:
        return ""
    return f", {bound.of_the_rate:.2g} of its {bound.card.speed / 1000:g} Gbit/s"


def _expectation(bound: LinkBound) -> str:
    steps = [f"{us / 1000:.1f} ms at {rate:g} Gbit/s" for rate, us in bound.expected_us.items()]
    return f" Expected: {', '.join(steps)}." if steps else ""


def _bound_cause(bound: LinkBound) -> str:
    causes = []
    if bound.fallen is not None:
        first, last = (megabits_text(rate) for rate in bound.fallen)
        causes.append(f"the throughput fell from {first} to {last} during the run: other traffic, or a limit")
    if bound.loses_packets:
        causes.append(f"packets are lost on the way: {bound.link.retransmits} were sent again")
    if bound.at_its_rate:
        causes.append(
            "the rate of the card: no link is faulty, and the gradients do not fit through it in time"
        )
    elif bound.of_the_rate is not None and not causes:
        causes.append(
            "a part of the route is slower than the card, other traffic uses it, or one processor core per "
            "connection cannot send faster"
        )
    return "; ".join(causes) or "the rate of the link, which the interface does not state"


def _slow_link(context: RuleContext, slow: SlowLink, cost: Cost | None) -> Finding:
    hidden = cost is not None and cost.share < _LEAST_SHARE
    return context.finding(
        RULE,
        f"{_name(slow)} is slow: {megabits_text(slow.bandwidth)} while busy, against a median of "
        f"{megabits_text(slow.usual)} on the other links ({slow.factor:.2g} times as fast). {_describe_cost(cost)}",
        severity=Severity.NOTE if hidden else Severity.WARNING,
        stage="backward",
        ranks=_ranks(context, slow.nodes),
        evidence={
            "nodes": list(slow.nodes),
            "megabits": round(slow.bandwidth * 8e-6, 1),
            "usual_megabits": round(slow.usual * 8e-6, 1),
            "factor": round(slow.factor, 2),
            "cost_ms": None if cost is None else round(cost.cost_us / 1000, 3),
            "step_ms": None if cost is None else round(cost.step_us / 1000, 3),
            "links": [_link_row(link) for link in slow.links[:_MOST_LINKS]],
        },
        cause=_NODE if len(slow.nodes) == 1 else _DIRECTION,
        fix=_FIX,
    )


def _name(slow: SlowLink) -> str:
    if len(slow.nodes) == 1:
        which = f" at {slow.address}" if slow.address else ""
        return f"The link of {slow.nodes[0]}{which} to the other nodes"
    return f"The link from {slow.nodes[0]} to {slow.nodes[1]}"


def _describe_cost(cost: Cost | None) -> str:
    if cost is None:
        return "Its cost is unknown: no step was timed."
    amount = f"{cost.cost_us / 1000:.1f} ms of a {cost.step_us / 1000:.1f} ms step"
    if cost.share < _LEAST_SHARE:
        return f"It costs at most {amount}: the backward hides the rest."
    return f"It costs {amount} ({100 * cost.share:.0f} %) on every rank."


def _link_row(link: NodeLink) -> dict[str, Any]:
    return {
        "from": link.source,
        "to": link.target,
        "megabits": round(link.bandwidth * 8e-6, 1),
        "busy_pct": round(100 * link.busy_share),
        "sent_again": link.retransmits,
    }


def _slow_port(context: RuleContext, slow: SlowPort) -> Finding:
    port = slow.port
    symptoms = {
        "rate": f"runs at {slow.own / 1000:g} Gbit/s, the others at {slow.usual / 1000:g} Gbit/s (median)",
        "errors": f"counted {slow.own:.0f} errors while the job ran, the others {slow.usual:.0f} (median)",
        "waiting": f"had data but could not send it {_times(slow)} as often per byte as the others",
    }
    return context.finding(
        RULE,
        f"InfiniBand port {port.name} of {port.node} {symptoms[slow.why]}. "
        f"It sent {port.sent / 1e6:.0f} MB in {port.seconds:.1f} s.",
        # Waiting is a symptom that another port may cause.
        severity=Severity.NOTE if slow.why == "waiting" else Severity.WARNING,
        stage="backward",
        ranks=_ranks(context, (port.node,)),
        evidence={
            "nodes": [port.node],
            "port": port.name,
            "rate_mbit": port.speed,
            "errors": port.errors,
            "waited_ticks": port.waited,
        },
        cause=_PORT_CAUSES[slow.why],
        fix=_PORT_FIX,
    )


def _times(slow: SlowPort) -> str:
    return f"{slow.own / slow.usual:.0f} times" if slow.usual else "many times"


def _ranks(context: RuleContext, nodes: tuple[str, ...]) -> tuple[int, ...]:
    known = context.links.ranks if context.links is not None else {}
    return tuple(sorted(rank for node in nodes for rank in known.get(node, ())))
