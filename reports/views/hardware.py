"""Hardware and traffic: processors, memory and GPUs of the nodes, bytes per step, and the links between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import megabits_text, optional_size_text, rank_ranges
from ddpcheck.reports.views.table import Column, Row, Table, known, numbers, row

# With fewer samples than this a job was over before its hardware could be measured.
_FEWEST_SAMPLES = 4
_MOST_ROWS = 2048

Node = Mapping[str, Any]
Gpu = Mapping[str, Any]


def hardware_nodes(report: Report) -> list[Node]:
    return list(report.hardware.get("nodes") or ())


def node_table(report: Report) -> Table | None:
    """Processors, memory and interfaces of each node."""
    nodes = hardware_nodes(report)
    if not nodes:
        return None
    columns = (
        Column("node"),
        Column("mean CPU", number=True),
        Column("peak CPU", number=True, detail=True),
        Column("CPUs", number=True),
        Column("peak memory", number=True),
        Column("memory", number=True),
        Column("interfaces", detail=True),
        Column("GPUs"),
    )
    return Table(
        "Hardware",
        columns,
        tuple(map(_node_row, nodes)),
        noun="nodes",
        minor=all(node["samples"] < _FEWEST_SAMPLES for node in nodes),
    )


def _node_row(node: Node) -> Row:
    cpu, memory = node["cpu"], node["memory"]
    no_gpus = f"none ({node['note']})" if node["note"] else "none"
    return row(
        [
            node["host"],
            None if cpu is None else f"{cpu['mean']:.0f} %",
            None if cpu is None else f"{cpu['most']:.0f} %",
            node["cpus"],
            optional_size_text(memory["most"]) or None,
            optional_size_text(memory["total"]) or None,
            ", ".join(f"{each['name']} ({_speed(each['speed'])})" for each in node["interfaces"]),
            str(len(node["gpus"])) if node["gpus"] else no_gpus,
        ],
        weight=0.0 if cpu is None else cpu["mean"],
    )


def _speed(megabits: int | None) -> str:
    return "unknown speed" if megabits is None else f"{megabits} Mbit/s"


def gpu_table(report: Report) -> Table | None:
    """None where no node has a GPU."""
    gpus = named_gpus(report)
    if not gpus:
        return None
    columns = (
        Column("GPU"),
        Column("model", detail=True),
        Column("ranks", detail=True),
        Column("peak memory", number=True),
        Column("memory", number=True, detail=True),
        Column("mean use", "mean utilisation", number=True),
        Column("min clock", number=True),
        Column("mean clock", number=True, detail=True),
        Column("max temp", "maximum temperature", number=True),
        Column("power", "mean power", number=True),
        Column("PCIe link", number=True, detail=True),
        Column("NVLink", "NVLink sent", number=True),
        Column("PCIe", "PCIe sent", number=True),
        Column("PCIe received", number=True, detail=True),
    )
    rows = tuple(_gpu_row(name, gpu) for name, gpu in gpus)
    return Table("GPUs", columns, rows, notes=tuple(gpu_warnings(gpus)), noun="GPUs")


def named_gpus(report: Report) -> list[tuple[str, Gpu]]:
    """GPUs with their index, and with their host where there are several nodes."""
    nodes = hardware_nodes(report)
    several = len(nodes) > 1
    gpus = [
        (f"{node['host']}:{gpu['index']}" if several else str(gpu["index"]), gpu)
        for node in nodes
        for gpu in node["gpus"]
    ]
    return gpus[:_MOST_ROWS]


def gpu_warnings(gpus: Sequence[tuple[str, Gpu]]) -> list[str]:
    """GPUs with the same warning share a line."""
    names: dict[str, list[str]] = {}
    for name, gpu in gpus:
        for warning in gpu["remarks"]:
            names.setdefault(warning, []).append(name)
    return [f"GPU {', '.join(some)}: {warning}" for warning, some in names.items()]


def _gpu_row(name: str, gpu: Gpu) -> Row:
    clock, pcie, nvlink, use = gpu["clock"], gpu["pcie"] or {}, gpu.get("nvlink") or {}, gpu["busy"]
    mean_clock = clock.get("mean")
    return row(
        [
            name,
            gpu["name"],
            ", ".join(map(str, gpu.get("ranks") or ())) or None,
            optional_size_text(gpu["memory"]["most"]) or None,
            optional_size_text(gpu["memory"]["total"]) or None,
            None if use is None else f"{use['mean']:.0f} %",
            known(clock.get("lowest_seen"), "{:.0f} MHz".format),
            None if mean_clock is None else f"{mean_clock:.0f} of {clock['highest']} MHz",
            known(gpu["temperature"], "{:.0f} C".format),
            known(gpu["power_watts"], "{:.0f} W".format),
            _pcie_link(gpu["pcie_link"]),
            optional_size_text(nvlink.get("sent")) or None,
            optional_size_text(pcie.get("sent")) or None,
            optional_size_text(pcie.get("received")) or None,
        ],
        weight=len(gpu["remarks"]),
    )


def _pcie_link(link: Mapping[str, Any]) -> str | None:
    now, most = link["now"], link["most"]
    if not now or not most:
        return None
    return f"{now['generation']}.0 x{now['width']} of {most['generation']}.0 x{most['width']}"


def nvlink_table(report: Report) -> Table | None:
    rows = [
        row([name, link["link"], optional_size_text(link["sent"]), optional_size_text(link["received"])])
        for name, gpu in named_gpus(report)
        for link in gpu.get("nvlink_by_link") or ()
    ][:_MOST_ROWS]
    columns = (Column("GPU"), *numbers(("NVLink", "sent", "received")))
    return Table("Bytes by NVLink", columns, tuple(rows), noun="links") if rows else None


def gpu_process_table(report: Report) -> Table | None:
    rows = [
        row(
            [
                name,
                process["pid"],
                None if process["rank"] is None else f"rank {process['rank']}",
                optional_size_text(process["most"]),
            ]
        )
        for name, gpu in named_gpus(report)
        for process in gpu.get("processes") or ()
    ][:_MOST_ROWS]
    columns = (
        Column("GPU"),
        Column("process", number=True),
        Column("rank"),
        Column("peak memory", number=True),
    )
    return Table("Memory by process", columns, tuple(rows), noun="processes") if rows else None


def topology_tables(report: Report) -> list[Table]:
    """How the GPUs of each node are connected."""
    tables = []
    for node in hardware_nodes(report):
        if len(node.get("topology") or ()) > 1:
            names = [f"GPU {gpu['index']}" for gpu in node["gpus"]]
            rows = tuple(row([name, *cells]) for name, cells in zip(names, node["topology"], strict=False))
            columns = (Column(""), *map(Column, names))
            tables.append(Table(f"GPU topology of {node['host']}", columns, rows, noun="GPUs"))
    return tables


def traffic_table(report: Report) -> Table | None:
    """A row for each kind of link that moved bytes, or was expected to."""
    traffic = report.traffic
    rows = [each for node in traffic.get("nodes") or () for each in _traffic_rows(node)]
    if not rows:
        return None
    columns = (
        Column("node"),
        Column("ranks", detail=True),
        Column("link"),
        *numbers(("sent", "received", "expected", "of expected", "steps")),
    )
    gradients, expected = optional_size_text(traffic["gradient_bytes"]), traffic.get("expected")
    legend = f"A step reduces {gradients} of gradients over {traffic['backend']}."
    if expected is not None:
        legend += f" The expected traffic of all ranks together is {optional_size_text(expected)}."
    why_not = traffic.get("why_not")
    return Table(
        "Traffic",
        columns,
        tuple(rows),
        subtitle="bytes per step",
        notes=(f"Expected traffic is unknown: {why_not}",) if why_not else (),
        legend=legend,
        noun="links",
    )


def _traffic_rows(node: Node) -> list[Row]:
    rows: list[Row] = []
    for kind, moved in node["classes"].items():
        if not (moved["sent"] or moved["received"] or moved["expected"]):
            continue
        expected = moved["expected"]
        share = moved["sent"] / expected if expected else None
        rows.append(
            row(
                [
                    node["host"],
                    rank_ranges(node["ranks"]),
                    _link_name(node, kind),
                    optional_size_text(moved["sent"]),
                    optional_size_text(moved["received"]),
                    known(expected, lambda size: optional_size_text(int(size))),
                    None if share is None else f"{100 * share:.0f} %",
                    f"{node['steps']:.0f}",
                ],
                weight=0.0 if share is None else abs(share - 1),
            )
        )
    return rows


def _link_name(node: Node, kind: str) -> str:
    """The kind of link, with the interface where only one was used."""
    used = [
        link["name"] for link in node["links"] if link["class"] == kind and link["sent"] + link["received"]
    ]
    return f"{kind} {used[0]}" if len(used) == 1 and kind in ("network", "infiniband") else kind


def link_table(report: Report) -> Table | None:
    """The slowest links first; None for a job on one node."""
    links = sorted(report.links.get("links") or (), key=lambda link: link["bandwidth"])
    if not links:
        return None
    columns = (
        Column("from"),
        Column("to"),
        Column("addresses", detail=True),
        Column("throughput", number=True),
        Column("busy", "share of time busy", number=True),
        Column("per step", "sent per step", number=True),
        Column("retransmits", number=True),
        Column("min RTT", "minimum round trip", number=True),
    )
    rows = tuple(_link_row(link) for link in links)
    return Table("Links", columns, rows, subtitle="throughput while busy", noun="links")


def _link_row(link: Mapping[str, Any]) -> Row:
    return row(
        [
            link["source"],
            link["target"],
            f"{link['source_address']} to {link['target_address']}",
            megabits_text(link["bandwidth"]),
            f"{100 * link['busy_share']:.0f} %",
            optional_size_text(round(link["bytes"] / link["steps"])) if link["steps"] else None,
            link["retransmits"],
            f"{link['min_rtt_us'] / 1000:.3g} ms",
        ],
        weight=-link["bandwidth"],
    )


def port_table(report: Report) -> Table | None:
    """None without InfiniBand."""
    ports = report.links.get("ports") or ()
    if not ports:
        return None
    columns = (
        Column("port"),
        *numbers(("rate", "sent", "received", "errors")),
        Column("wait ticks", number=True),
    )
    rows = tuple(
        row(
            [
                f"{port['node']} {port['name']}",
                known(port["speed"], lambda speed: f"{speed / 1000:g} Gbit/s"),
                optional_size_text(port["sent"]),
                optional_size_text(port["received"]),
                port["errors"],
                port["waited"],
            ],
            weight=port["errors"],
        )
        for port in ports
    )
    return Table("InfiniBand ports", columns, rows, noun="ports")


def link_summary(report: Report) -> str:
    """Whether a link is slow."""
    slow = report.links.get("slow")
    if slow is None:
        return "No link is an outlier."
    return (
        f"{' to '.join(slow['nodes'])} is slow: {megabits_text(slow['bandwidth'])} while busy; the other links have "
        f"{megabits_text(slow['usual'])}, {slow['factor']:.2g} times as much."
    )


def slowdowns(report: Report) -> dict[tuple[str, str], float]:
    """How many times slower than usual each pair of nodes is; of several interfaces the slowest."""
    usual = report.links.get("usual") or 0.0
    factors: dict[tuple[str, str], float] = {}
    for link in report.links.get("links") or ():
        pair = link["source"], link["target"]
        factors[pair] = max(factors.get(pair, 0.0), round(usual / max(link["bandwidth"], 1), 3))
    return factors
