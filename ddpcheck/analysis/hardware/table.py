"""The key `hardware` of report.json: what each node has, and what it did while the job ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddpcheck.analysis.hardware.facts import InterfaceFacts
from ddpcheck.analysis.hardware.gpu_table import gpu_row
from ddpcheck.analysis.hardware.samples import MOST_DRAWN, NodeSamples
from ddpcheck.analysis.hardware.series import series_of


def hardware_table(nodes: Sequence[NodeSamples]) -> dict[str, Any]:
    """What each node has and did; empty where nothing was sampled."""
    if not nodes:
        return {}
    return {"nodes": [_node(node, drawn=number < MOST_DRAWN) for number, node in enumerate(nodes)]}


def _node(node: NodeSamples, drawn: bool) -> dict[str, Any]:
    facts, last = node.facts, node.last
    return {
        "host": node.host,
        "samples": node.count,
        "seconds": round(last.time - node.first.time, 2) if last and node.first else 0.0,
        "sampling_cpu_seconds": node.cpu_seconds,
        "cpus": facts.cpus,
        "cpu": node.tally.cpu.row(),
        "memory": {"total": facts.memory, "most": node.tally.memory},
        "interfaces": _interfaces(node),
        "infiniband": _infiniband(node),
        "ranks": _ranks(node),
        "note": facts.note,
        "driver": facts.driver,
        "gpus": [gpu_row(gpu, node.tally_of(place), node.tally.pids) for place, gpu in enumerate(facts.gpus)],
        "topology": [list(row) for row in facts.topology],
        "p2p": [list(row) for row in facts.p2p],
        "series": series_of(node.series) if drawn else {},
    }


def _interfaces(node: NodeSamples) -> list[dict[str, Any]]:
    found = []
    for name, row in (node.last.interfaces if node.last else {}).items():
        known = node.facts.interfaces.get(name, InterfaceFacts(name))
        received, sent = node.tally.rates.get(name, (0, 0))
        found.append(
            {
                "name": name,
                "class": "loopback" if known.loopback else "network",
                "driver": known.driver,
                "speed": known.speed,
                "running": known.running,
                "addresses": list(known.addresses),
                "received": row[0],
                "sent": row[1],
                "most_received_a_second": received,
                "most_sent_a_second": sent,
                "errors": row[2] + row[3],
                "drops": row[4] + row[5],
            }
        )
    return found


def _infiniband(node: NodeSamples) -> list[dict[str, Any]]:
    ports = node.last.infiniband if node.last else {}
    return [
        {**asdict(port), **dict(zip(("received", "sent", "errors", "waited"), ports[name], strict=True))}
        for name, port in node.facts.infiniband.items()
        if name in ports
    ]


def _ranks(node: NodeSamples) -> dict[str, Any]:
    """The memory of each rank at its most, what it read and wrote, and the GPUs that its process was seen on."""
    ordered = sorted(node.tally.ranks.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else 0)
    return {
        rank: {**row, "gpus": sorted(node.gpu_index(place) for place in row["gpus"])} for rank, row in ordered
    }
