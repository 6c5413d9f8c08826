"""Hardware of one attempt: nodes, samples and traffic, and the key `hardware` of report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hardware.rank_gpus import match_ranks, ranks_on
from ddpcheck.analysis.hardware.samples import (
    MOST_NODES_WITH_SERIES,
    GpuFacts,
    InterfaceFacts,
    NodeSamples,
    Window,
    read_nodes,
    series_of,
)
from ddpcheck.analysis.hardware.statistics import GpuSample, GpuStatistics
from ddpcheck.analysis.hardware.traffic import NodeTraffic, Traffic, traffic_of
from ddpcheck.analysis.network.connections import NodeLinks, links_of

# Minimum number of busy samples before the PCIe generation is evaluated.
_FEWEST_AT_WORK = 4


def remarks_on(facts: GpuFacts, statistics: GpuStatistics) -> list[str]:
    """Warnings about a GPU."""
    lost = [f"lost ({statistics.lost})"] if statistics.lost else []
    held = [
        f"{reason} in {100 * share:.0f} % of the samples" for reason, share in statistics.throttling().items()
    ]
    cut = [f"cut in {len(facts.mig)} MIG slices"] if facts.mig else []
    return lost + held + _memory_errors(statistics) + _narrow(facts, statistics) + cut


def _memory_errors(statistics: GpuStatistics) -> list[str]:
    """Memory errors during the job."""
    kinds = zip(("corrected", "uncorrected"), statistics.last.ecc, strict=False)
    return [f"{count} {kind} memory error{'s' if count > 1 else ''}" for kind, count in kinds if count]


def _narrow(facts: GpuFacts, statistics: GpuStatistics) -> list[str]:
    if len(facts.pcie) != 2:
        return []
    generation, width = facts.pcie
    remarks = []
    if len(statistics.last.pcie_link) == 2 and statistics.last.pcie_link[1] < width:
        # The generation drops when the link is idle; the width does not.
        remarks.append(f"PCIe runs x{statistics.last.pcie_link[1]} of x{width}")
    if statistics.at_work >= _FEWEST_AT_WORK and statistics.generation < generation:
        remarks.append(f"PCIe runs at generation {statistics.generation} of {generation} under load")
    return remarks


def gpu_row(node: NodeSamples, index: int) -> dict[str, Any]:
    """The row of the GPU at an index of the samples."""
    facts, statistics, ranks = node.facts.gpus[index], node.gpu_statistics(index), node.statistics.pids
    last = statistics.last
    return {
        "index": facts.index,
        "name": facts.name,
        "uuid": facts.uuid,
        "bus": facts.bus,
        "ranks": ranks_on(node, index),
        "memory": {"total": facts.memory, "most": statistics.memory},
        "busy": statistics.busy.row(),
        "memory_busy": statistics.memory_busy.row(),
        "clock": {
            "highest": facts.clock,
            "mean": None if (clock := statistics.clock.row()) is None else clock["mean"],
            "lowest_seen": statistics.lowest_clock,
            "memory_lowest_seen": statistics.lowest_memory_clock,
        },
        "throttled": statistics.throttling(),
        "temperature": statistics.temperature,
        "power_watts": None if statistics.power is None else round(statistics.power / 1000, 2),
        "ecc": {"corrected": last.ecc[0], "uncorrected": last.ecc[1]} if len(last.ecc) == 2 else None,
        "nvlinks": len(facts.nvlinks),
        "nvlink": _moved(last.nvlink),
        "nvlink_by_link": _by_link(facts, last),
        "pcie": _moved(last.pcie),
        "pcie_link": {
            "most": _link(facts.pcie),
            "now": _link(last.pcie_link),
            "generation_at_work": statistics.generation or None,
        },
        "processes": [
            {
                "pid": pid,
                "rank": int(rank) if (rank := ranks.get(pid, "")).isdecimal() else None,
                "most": most,
            }
            for pid, most in sorted(statistics.processes.items())
        ],
        "mig": [
            {
                "uuid": uuid,
                "memory": memory,
                "most": statistics.mig[number] if number < len(statistics.mig) else None,
                "ranks": ranks_on(node, index, number),
            }
            for number, (uuid, memory) in enumerate(facts.mig)
        ],
        "unsupported": list(facts.unsupported),
        "lost": statistics.lost,
        "remarks": remarks_on(facts, statistics),
    }


def _by_link(facts: GpuFacts, last: GpuSample) -> list[dict[str, int]]:
    if len(facts.nvlinks) != len(last.links):
        return []
    return [
        {"link": link, "sent": sent, "received": received}
        for link, (sent, received) in zip(facts.nvlinks, last.links, strict=True)
    ]


def _link(numbers: tuple[int, ...]) -> dict[str, int] | None:
    return {"generation": numbers[0], "width": numbers[1]} if len(numbers) == 2 else None


def _moved(pair: tuple[int, int] | None) -> dict[str, int] | None:
    return None if pair is None else {"sent": pair[0], "received": pair[1]}


def hardware_table(nodes: Sequence[NodeSamples]) -> dict[str, Any]:
    """Hardware and utilization of each node; empty if nothing was sampled."""
    if not nodes:
        return {}
    return {
        "nodes": [
            _node(node, with_series=number < MOST_NODES_WITH_SERIES) for number, node in enumerate(nodes)
        ]
    }


def _node(node: NodeSamples, with_series: bool) -> dict[str, Any]:
    facts, last = node.facts, node.last
    return {
        "host": node.host,
        "samples": node.count,
        "seconds": round(last.time - node.first.time, 2) if last and node.first else 0.0,
        "sampling_cpu_seconds": node.cpu_seconds,
        "cpus": facts.cpus,
        "cpu": node.statistics.cpu.row(),
        "memory": {"total": facts.memory, "most": node.statistics.memory},
        "interfaces": _interfaces(node),
        "infiniband": _infiniband(node),
        "ranks": _ranks(node),
        "note": facts.note,
        "driver": facts.driver,
        "gpus": [gpu_row(node, index) for index in range(len(facts.gpus))],
        "topology": [list(row) for row in facts.topology],
        "p2p": [list(row) for row in facts.p2p],
        "series": series_of(node.series) if with_series else {},
    }


def _interfaces(node: NodeSamples) -> list[dict[str, Any]]:
    remarks = []
    for name, row in (node.last.interfaces if node.last else {}).items():
        known = node.facts.interfaces.get(name, InterfaceFacts(name))
        received, sent = node.statistics.rates.get(name, (0, 0))
        remarks.append(
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
    return remarks


def _infiniband(node: NodeSamples) -> list[dict[str, Any]]:
    ports = node.last.infiniband if node.last else {}
    return [
        {**asdict(port), **dict(zip(("received", "sent", "errors", "waited"), ports[name], strict=True))}
        for name, port in node.facts.infiniband.items()
        if name in ports
    ]


def _ranks(node: NodeSamples) -> dict[str, Any]:
    """Peak memory, storage traffic and GPUs of each rank."""
    ordered = sorted(
        node.statistics.ranks.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else 0
    )
    return {
        rank: {
            **{name: value for name, value in row.items() if name != "mig"},
            "gpus": sorted(node.gpu_index(index) for index in row["gpus"]),
        }
        for rank, row in ordered
    }


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
    match_ranks(attempt, nodes)
    return Machine(nodes, traffic_of(attempt, nodes), links_of(attempt, nodes))


def _windows(attempt: Attempt) -> dict[str, Window]:
    """Start and end of the steps on each host, by its own clock, which is also that of its samples."""
    on_host: dict[str, list[int]] = {}
    for number, rank in attempt.ranks.items():
        on_host.setdefault(rank.header.host, []).append(number)
    windows = {host: attempt.step_timelines.window(ranks) for host, ranks in on_host.items()}
    return {host: window for host, window in windows.items() if window is not None}
