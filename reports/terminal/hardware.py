"""What the nodes did, in a few rows: processors, memory, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import megabits_text, optional_size_text
from ddpcheck.reports.terminal.console import LABEL, ReportConsole, indented

_TERMINAL_TRAFFIC_MOST_NODES = 8


def put_traffic(ink: ReportConsole, report: Report) -> None:
    """A row for each kind of link that moved something, or should have."""
    nodes = report.traffic.get("nodes", ())
    rows = [row for node in nodes[:_TERMINAL_TRAFFIC_MOST_NODES] for row in _rows(node)]
    if not rows:
        return
    ink.gap()
    headers = ["node", "link", "sent", "received", "expected", "steps"]
    ink.put(ink.text("Traffic, bytes a step", LABEL), indented(ink.columns(headers, rows)))
    if len(nodes) > _TERMINAL_TRAFFIC_MOST_NODES:
        ink.put(ink.text("more nodes are in report.json"), indent=2)
    if report.traffic["why_not"]:
        ink.put(ink.text(f"nothing is expected: {report.traffic['why_not']}"), indent=2)


def _rows(node: Mapping[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for kind, moved in node["classes"].items():
        if not (moved["sent"] or moved["received"] or moved["expected"]):
            continue
        rows.append(
            [
                "" if rows else node["host"],
                _named(node, kind),
                optional_size_text(moved["sent"]),
                optional_size_text(moved["received"]),
                _expected(moved),
                "" if rows else f"{node['steps']:.0f}",
            ]
        )
    return rows


def _expected(moved: Mapping[str, Any]) -> str:
    """What had to be sent, and how much of it was measured."""
    expected = moved["expected"]
    if not expected:
        return "-" if expected is None else "0"
    return f"{optional_size_text(expected)} ({100 * moved['sent'] / expected:.0f} %)"


def _named(node: Mapping[str, Any], kind: str) -> str:
    """The kind of link, and which one where it is one alone."""
    used = [
        link["name"] for link in node["links"] if link["class"] == kind and link["sent"] + link["received"]
    ]
    return f"{kind} {used[0]}" if len(used) == 1 and kind in ("network", "infiniband") else kind


_MOST_ROWS = 8


def put_links(ink: ReportConsole, report: Report) -> None:
    """Nothing for a job on one node."""
    links = sorted(report.links.get("links", ()), key=lambda link: link["bandwidth"])
    ports = report.links.get("ports", ())
    if links:
        ink.gap()
        headers = ["from", "to", "gave", "busy", "sent a step", "sent again", "round trip"]
        rows = [_link(link) for link in links[:_MOST_ROWS]]
        ink.put(ink.text("Links, while asked", LABEL), indented(ink.columns(headers, rows)))
    if ports:
        ink.gap()
        headers = ["port", "rate", "sent", "errors", "waited"]
        rows = [_port(port) for port in ports[:_MOST_ROWS]]
        ink.put(ink.text("InfiniBand ports", LABEL), indented(ink.columns(headers, rows)))
    if max(len(links), len(ports)) > _MOST_ROWS:
        ink.put(ink.text("the rest is in report.json"), indent=2)


def _link(link: Mapping[str, Any]) -> list[object]:
    return [
        link["source"],
        link["target"],
        megabits_text(link["bandwidth"]),
        f"{100 * link['busy_share']:.0f} %",
        optional_size_text(round(link["bytes"] / link["steps"])) if link["steps"] else "-",
        f"{link['retransmits']}",
        f"{link['min_rtt_us'] / 1000:.3g} ms",
    ]


def _port(port: Mapping[str, Any]) -> list[object]:
    return [
        f"{port['node']} {port['name']}",
        "-" if port["speed"] is None else f"{port['speed'] / 1000:g} Gbit/s",
        optional_size_text(port["sent"]),
        f"{port['errors']}",
        f"{port['waited']} ticks",
    ]


_MOST_NODES = 8
_MOST_GPUS = 16
# A job that was over before it could be looked at more than once or twice has nothing to show.
_FEWEST_SAMPLES = 4


def put_hardware(ink: ReportConsole, report: Report) -> None:
    """One row a node, and one a GPU where there are any."""
    nodes = [node for node in report.hardware.get("nodes", ()) if node["samples"] >= _FEWEST_SAMPLES]
    if not nodes:
        return
    ink.gap()
    headers = ["node", "cpu mean", "memory most", "GPUs"]
    rows = [_node_row(node) for node in nodes[:_MOST_NODES]]
    ink.put(ink.text("Hardware", LABEL), indented(ink.columns(headers, rows)))
    gpus = [(node["host"], gpu) for node in nodes for gpu in node["gpus"]]
    if gpus:
        headers = ["gpu", "memory most", "busy", "clock low", "temp", "power", "NVLink", "PCIe"]
        rows = [_gpu_row(host, gpu, len(nodes) > 1) for host, gpu in gpus[:_MOST_GPUS]]
        ink.put(indented(ink.columns(headers, rows)))
        for remark in _remarks(gpus, len(nodes) > 1)[:_MOST_GPUS]:
            ink.put(ink.text(remark), indent=2)
    if len(nodes) > _MOST_NODES or len(gpus) > _MOST_GPUS:
        ink.put(ink.text("the rest is in report.json"), indent=2)


def _node_row(node: Mapping[str, Any]) -> list[object]:
    cpu, memory = node["cpu"], node["memory"]
    gpus = str(len(node["gpus"])) if node["gpus"] else f"none ({node['note']})" if node["note"] else "none"
    return [
        node["host"],
        "-" if cpu is None else f"{cpu['mean']:.0f} % of {node['cpus']}",
        f"{optional_size_text(memory['most'])} of {optional_size_text(memory['total'] or 0)}",
        gpus,
    ]


def _gpu_row(host: str, gpu: Mapping[str, Any], several: bool) -> list[object]:
    busy, clock = gpu["busy"], gpu["clock"]["lowest_seen"]
    return [
        _name(host, gpu, several),
        _told(gpu["memory"]["most"], optional_size_text),
        "-" if busy is None else f"{busy['mean']:.0f} %",
        "-" if clock is None else f"{clock} MHz",
        "-" if gpu["temperature"] is None else f"{gpu['temperature']} C",
        "-" if gpu["power_watts"] is None else f"{gpu['power_watts']:.0f} W",
        _told((gpu["nvlink"] or {}).get("sent"), optional_size_text),
        _told((gpu["pcie"] or {}).get("sent"), optional_size_text),
    ]


def _told(value: Any, spoken: Callable[[int], str]) -> str:
    return "-" if value is None else spoken(value)


def _remarks(gpus: Sequence[tuple[str, Mapping[str, Any]]], several: bool) -> list[str]:
    """What somebody should look at; GPUs of which the same is to be said share a line."""
    found: dict[str, list[str]] = {}
    for host, gpu in gpus:
        for remark in gpu["remarks"]:
            found.setdefault(remark, []).append(_name(host, gpu, several))
    return [f"GPU {', '.join(names)}: {remark}" for remark, names in found.items()]


def _name(host: str, gpu: Mapping[str, Any], several: bool) -> str:
    return f"{host}:{gpu['index']}" if several else str(gpu["index"])
