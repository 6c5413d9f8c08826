"""The key `hardware` of report.json: what each node has, and what it did while the job ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ddpcheck.analysis.hardware.facts import InterfaceFacts
from ddpcheck.analysis.hardware.gpu_table import gpu_row, spread
from ddpcheck.analysis.hardware.node_samples import NodeSamples
from ddpcheck.analysis.hardware.sample import Sample
from ddpcheck.analysis.hardware.series import rates_of, series_of

# Beyond so many nodes, series for drawing stay in the node logs.
MOST_DRAWN = 16


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
        # The first sample has nothing before it to be compared with.
        "cpu": spread([sample.cpu for sample in node.series[1:]]),
        "memory": {"total": facts.memory, "most": max(sample.memory for sample in node.series)},
        "interfaces": _interfaces(node),
        "infiniband": _infiniband(node),
        "ranks": _ranks(node),
        "note": facts.note,
        "driver": facts.driver,
        "gpus": [gpu_row(node, place, gpu) for place, gpu in enumerate(facts.gpus)],
        "topology": [list(row) for row in facts.topology],
        "p2p": [list(row) for row in facts.p2p],
        "series": series_of(node.series) if drawn else {},
    }


def _interfaces(node: NodeSamples) -> list[dict[str, Any]]:
    found = []
    for name, row in (node.last.interfaces if node.last else {}).items():
        known = node.facts.interfaces.get(name, InterfaceFacts(name))
        rates = rates_of(node.series, partial(_bytes_over, name))
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
                "most_received_a_second": max(rate[0] for rate in rates),
                "most_sent_a_second": max(rate[1] for rate in rates),
                "errors": row[2] + row[3],
                "drops": row[4] + row[5],
            }
        )
    return found


def _bytes_over(name: str, sample: Sample) -> tuple[int, ...]:
    return sample.interfaces.get(name, ())[:2]


def _infiniband(node: NodeSamples) -> list[dict[str, Any]]:
    ports = node.last.infiniband if node.last else {}
    return [
        {**asdict(port), "received": ports[name][0], "sent": ports[name][1], "errors": ports[name][2]}
        for name, port in node.facts.infiniband.items()
        if name in ports
    ]


def _ranks(node: NodeSamples) -> dict[str, Any]:
    """The memory of each rank at its most, what it read and wrote, and the GPUs that its process was seen on."""
    found: dict[str, dict[str, Any]] = {}
    for sample in node.series:
        for rank, (pid, resident, read, written) in sample.ranks.items():
            row = found.setdefault(rank, {"most_memory": 0, "gpus": []})
            row["most_memory"] = max(row["most_memory"], resident)
            row["storage_read"], row["storage_written"] = read, written
            row["gpus"] = sorted({*row["gpus"], *_gpus_of(node, sample, pid)})
    return dict(sorted(found.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else 0))


def _gpus_of(node: NodeSamples, sample: Sample, pid: int) -> list[int]:
    return [node.gpu_index(place) for place, gpu in enumerate(sample.gpus) if pid in gpu.processes]
