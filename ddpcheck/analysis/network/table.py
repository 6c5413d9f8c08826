"""The key `links` of report.json: throughput of each link between nodes while busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.network.model import NodeLink, SlowLink, cost_of
from ddpcheck.analysis.network.slow_link import carrying
from ddpcheck.analysis.timing.model import TimeTable

# The links with the longest busy time; the rest is only in the node logs.
MOST_LINKS = 512


def links_table(links: NodeLinks, times: Sequence[TimeTable]) -> dict[str, Any]:
    """Empty if there was no traffic between nodes."""
    if not links.links and not links.ports:
        return {}
    carried = carrying(links.links)
    kept = sorted(carried, key=lambda link: -link.busy_seconds)[:MOST_LINKS]
    return {
        "nodes": [{"host": name, "ranks": list(ranks)} for name, ranks in links.ranks.items()],
        "links": [link_row(link) for link in sorted(kept, key=lambda link: (link.ends, link.addresses))],
        "usual": _usual(carried, links.slow),
        "ports": [asdict(port) for port in links.ports[:MOST_LINKS]],
        "slow": None if links.slow is None else _slow(links.slow, times),
        "slow_port": None if links.slow_port is None else asdict(links.slow_port),
    }


def _usual(links: Sequence[NodeLink], slow: SlowLink | None) -> int | None:
    """The median of the links that are not slow."""
    if slow is not None:
        return round(slow.usual)
    return round(median(link.bandwidth for link in links)) if links else None


def link_row(link: NodeLink) -> dict[str, Any]:
    return {
        "source": link.source,
        "target": link.target,
        "source_address": link.source_address,
        "target_address": link.target_address,
        "bytes": link.bytes,
        "seconds": round(link.seconds, 3),
        "busy_seconds": round(link.busy_seconds, 3),
        "busy_share": round(link.busy_share, 3),
        "bandwidth": round(link.bandwidth),
        "steps": None if link.steps is None else round(link.steps, 1),
        "retransmits": link.retransmits,
        "min_rtt_us": link.min_rtt,
    }


def _slow(slow: SlowLink, times: Sequence[TimeTable]) -> dict[str, Any]:
    cost = cost_of(slow, times)
    return {
        "nodes": list(slow.nodes),
        "address": slow.address,
        "bandwidth": round(slow.bandwidth),
        "usual": round(slow.usual),
        "factor": round(slow.factor, 2),
        "cost_us": None if cost is None else cost.cost_us,
    }
