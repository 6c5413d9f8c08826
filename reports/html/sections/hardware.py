"""The nodes while the job ran: processors, interfaces and GPUs, in figures and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.formatting import optional_size_text
from ddpcheck.reports.html.chart import chart, series_table
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.html.table import folded_nodes

_MOST_NODES = 4
_MOST_ROWS = 2048
# More are folded away, but for what is to look at.
_MOST_SHOWN = 64

Node = Mapping[str, Any]
Gpu = Mapping[str, Any]


def gpu_tables(nodes: Sequence[Node]) -> Html | None:
    """None where no node has a GPU."""
    gpus = [(f"{node['host']}:{gpu['index']}", gpu) for node in nodes for gpu in node["gpus"]][:_MOST_ROWS]
    if not gpus:
        return None
    connected = [_connections(node) for node in nodes if len(node.get("topology") or ()) > 1][:_MOST_NODES]
    if len(gpus) <= _MOST_SHOWN:
        return joined([_figures(gpus), _remarks(gpus), _links(gpus), _processes(gpus), *connected])
    everything = joined([_figures(gpus), _links(gpus), _processes(gpus)])
    folded = tag("details", tag("summary", f"All {len(gpus)} GPUs"), everything)
    return joined([_remarks(gpus), folded, *connected])


def _figures(gpus: Sequence[tuple[str, Gpu]]) -> Html:
    headers = ("GPU", "", "busy", "memory", "of", "clock", "temperature", "power", "PCIe", "sent", "received")
    return table(headers, [_row(name, gpu) for name, gpu in gpus], "GPUs", numbers=range(2, 11))


def _remarks(gpus: Sequence[tuple[str, Gpu]]) -> Html | None:
    rows = [[name, "; ".join(gpu["remarks"])] for name, gpu in gpus if gpu.get("remarks")]
    return table(("GPU", "to look at"), rows, "GPUs to look at") if rows else None


def _row(name: str, gpu: Gpu) -> list[object]:
    clock, moved, busy = gpu["clock"].get("mean"), gpu["pcie"] or {}, gpu["busy"]
    return [
        name,
        gpu["name"],
        "-" if busy is None else f"{busy['mean']:.0f} %",
        optional_size_text(gpu["memory"]["most"]),
        optional_size_text(gpu["memory"]["total"]),
        "-" if clock is None else f"{clock:.0f} of {gpu['clock']['highest']} MHz",
        "-" if gpu["temperature"] is None else f"{gpu['temperature']} C",
        "-" if gpu["power_watts"] is None else f"{gpu['power_watts']:.0f} W",
        _link(gpu["pcie_link"]),
        optional_size_text(moved.get("sent")) or "-",
        optional_size_text(moved.get("received")) or "-",
    ]


def _link(link: Mapping[str, Any]) -> str:
    now, most = link["now"], link["most"]
    if not now or not most:
        return "-"
    return f"{now['generation']}.0 x{now['width']} of {most['generation']}.0 x{most['width']}"


def _links(gpus: Sequence[tuple[str, Gpu]]) -> Html | None:
    rows = [
        [name, link["link"], optional_size_text(link["sent"]), optional_size_text(link["received"])]
        for name, gpu in gpus
        for link in gpu.get("nvlink_by_link") or ()
    ][:_MOST_ROWS]
    headers = ("GPU", "NVLink", "sent", "received")
    return _folded("Bytes by NVLink", table(headers, rows, "NVLinks", numbers=(1, 2, 3))) if rows else None


def _processes(gpus: Sequence[tuple[str, Gpu]]) -> Html | None:
    rows = [
        [
            name,
            each["pid"],
            "-" if each["rank"] is None else f"rank {each['rank']}",
            optional_size_text(each["most"]),
        ]
        for name, gpu in gpus
        for each in gpu.get("processes") or ()
    ][:_MOST_ROWS]
    headers = ("GPU", "process", "", "memory, most")
    return _folded("Memory by process", table(headers, rows, "Processes", numbers=(1, 3))) if rows else None


def _connections(node: Node) -> Html:
    indices = [f"GPU {gpu['index']}" for gpu in node["gpus"]]
    rows = [[name, *row] for name, row in zip(indices, node["topology"], strict=False)]
    title = f"How the GPUs of {node['host']} are connected"
    return _folded(title, table(("", *indices), rows, title))


def _folded(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), content)


_MOST_DRAWN = 4


def section(made: PageContext) -> Html | None:
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
    memory = optional_size_text(node["memory"]["most"]), optional_size_text(node["memory"]["total"])
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
