"""Hardware of one attempt: nodes, samples and traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hardware.samples import NodeSamples, Window, read_nodes
from ddpcheck.analysis.hardware.traffic import NodeTraffic, Traffic, traffic_of
from ddpcheck.analysis.network.connections import NodeLinks, links_of


def traffic_table(traffic: Traffic | None) -> dict[str, Any]:
    """Bytes per step by node and link; empty if nothing was sampled."""
    if traffic is None:
        return {}
    return {
        "ranks": traffic.ranks,
        "backend": traffic.backend,
        "gradient_bytes": round(traffic.gradient_bytes),
        "expected": None if traffic.expected is None else round(traffic.expected),
        "why_not": traffic.why_not,
        "nodes": [_node_traffic(node) for node in traffic.nodes],
    }


def _node_traffic(node: NodeTraffic) -> dict[str, Any]:
    kinds = sorted({link.kind for link in node.links} | set(node.expected))
    return {
        "host": node.host,
        "ranks": list(node.ranks),
        "steps": node.steps,
        "seconds": node.seconds,
        "classes": {
            kind: {
                "sent": round(node.over(kind)[0]),
                "received": round(node.over(kind)[1]),
                "expected": round(node.expected[kind]) if kind in node.expected else None,
            }
            for kind in kinds
        },
        "links": [
            {
                "class": link.kind,
                "name": link.name,
                "sent": round(link.sent),
                "received": round(link.received),
                "speed": link.speed,
            }
            for link in node.links
        ],
    }


@dataclass(frozen=True)
class Machine:
    """Empty if nothing was sampled."""

    nodes: list[NodeSamples] = field(default_factory=list)
    traffic: Traffic | None = None
    links: NodeLinks = field(default_factory=NodeLinks)


def machine_of(folder: Path, attempt: Attempt) -> Machine:
    nodes = read_nodes(folder, _windows(attempt))
    return Machine(nodes, traffic_of(attempt, nodes), links_of(attempt, nodes))


def _windows(attempt: Attempt) -> dict[str, Window]:
    """Start and end of the steps on each host, by its own clock, which is also that of its samples."""
    on_host: dict[str, list[int]] = {}
    for number, rank in attempt.ranks.items():
        on_host.setdefault(rank.header.host, []).append(number)
    windows = {host: attempt.step_timelines.window(ranks) for host, ranks in on_host.items()}
    return {host: window for host, window in windows.items() if window is not None}
