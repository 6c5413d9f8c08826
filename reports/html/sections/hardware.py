"""The nodes while the job ran: processors, interfaces and GPUs, in figures and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.reports.html.chart import chart
from ddpcheck.reports.html.gpu_tables import gpu_tables
from ddpcheck.reports.html.markup import Html, joined, tag
from ddpcheck.reports.html.material import Material
from ddpcheck.reports.html.series_table import series_table
from ddpcheck.reports.html.table import folded_nodes
from ddpcheck.reports.trace_units import size_text

_MOST_DRAWN = 4


def section(made: Material) -> Html | None:
    nodes = (made.document.get("hardware") or {}).get("nodes") or []
    if not nodes:
        return None
    drawn = [_node(node) for node in nodes if (node.get("series") or {}).get("time")][:_MOST_DRAWN]
    return joined([_table(nodes), gpu_tables(nodes), *drawn])


def _table(nodes: Sequence[Mapping[str, Any]]) -> Html:
    headers = ("host", "processors", "busy", "memory", "of", "interfaces", "GPUs")
    return folded_nodes(headers, nodes, _node_row, _busy, "Nodes", numbers=(1, 2, 3, 4))


def _busy(node: Mapping[str, Any]) -> float:
    return 0.0 if node["cpu"] is None else float(node["cpu"]["mean"])


def _node_row(node: Mapping[str, Any]) -> list[list[object]]:
    interfaces = ", ".join(f"{one['name']} ({_speed(one['speed'])})" for one in node["interfaces"])
    memory = size_text(node["memory"]["most"]), size_text(node["memory"]["total"])
    gpus = node["note"] or f"{len(node['gpus'])} GPUs"
    return [[node["host"], node["cpus"], _spread(node["cpu"]), *memory, interfaces, gpus]]


def _node(node: Mapping[str, Any]) -> Html:
    series = node["series"]
    began = series["time"][0]
    seconds = [round(moment - began, 2) for moment in series["time"]]
    rates = {
        f"{link} {way}": [round(rate / 1e6, 3) for rate in series[link][way]]
        for link in ("network", "loopback")
        for way in ("sent", "received")
    }
    busy = {"processors": list(series["cpu"])}
    busy |= {f"GPU {number}": list(gpu["busy"]) for number, gpu in enumerate(series["gpus"])}
    return tag(
        "div",
        _lines(f"{node['host']}: traffic", "MB/s", seconds, rates),
        _lines(f"{node['host']}: how busy", "%", seconds, busy),
    )


def _lines(
    title: str, unit: str, seconds: Sequence[float], values: Mapping[str, Sequence[float | None]]
) -> Html:
    spec = {
        "x": seconds,
        "xLabel": "seconds",
        "yLabel": unit,
        "unit": unit,
        "series": [{"label": label, "values": list(line)} for label, line in values.items()],
    }
    most = max((value for line in values.values() for value in line if value is not None), default=0.0)
    return chart("lines", title, f"At most {most:.4g} {unit}.", spec, series_table(values, title, unit))


def _spread(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['mean']:.0f} %, at most {spread['most']:.0f} %"


def _speed(mbit: int | None) -> str:
    return "speed not known" if mbit is None else f"{mbit} Mbit/s"
