"""The key `traffic` of report.json: bytes a step by node and link."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.hardware.traffic import NodeTraffic, Traffic


def traffic_table(traffic: Traffic | None) -> dict[str, Any]:
    """Bytes a step by node and link; empty where nothing was sampled."""
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
