"""What the nodes did, in a few rows: processors, memory, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.reports.terminal.console import LABEL, Ink, indented
from ddpcheck.reports.trace_units import size_text

_MOST_NODES = 8
_MOST_GPUS = 16
# A job that was over before it could be looked at more than once or twice has nothing to show.
_FEWEST_SAMPLES = 4


def put_hardware(ink: Ink, report: Report) -> None:
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
        f"{size_text(memory['most'])} of {size_text(memory['total'] or 0)}",
        gpus,
    ]


def _gpu_row(host: str, gpu: Mapping[str, Any], several: bool) -> list[object]:
    busy, clock = gpu["busy"], gpu["clock"]["lowest_seen"]
    return [
        _name(host, gpu, several),
        _told(gpu["memory"]["most"], size_text),
        "-" if busy is None else f"{busy['mean']:.0f} %",
        "-" if clock is None else f"{clock} MHz",
        "-" if gpu["temperature"] is None else f"{gpu['temperature']} C",
        "-" if gpu["power_watts"] is None else f"{gpu['power_watts']:.0f} W",
        _told((gpu["nvlink"] or {}).get("sent"), size_text),
        _told((gpu["pcie"] or {}).get("sent"), size_text),
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
