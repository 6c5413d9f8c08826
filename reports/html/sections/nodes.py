"""Nodes: memory of their ranks, processors, GPUs and traffic, and a heat map of slow links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import megabits_text
from ddpcheck.reports.html.components import Html, chart, chosen_ranks, folded, joined, rows_table, tag, view
from ddpcheck.reports.verdict import counted
from ddpcheck.reports.views.hardware import (
    gpu_process_table,
    gpu_table,
    hardware_nodes,
    link_summary,
    link_table,
    node_table,
    nvlink_table,
    port_table,
    slowdowns,
    topology_tables,
    traffic_table,
)
from ddpcheck.reports.views.memory import memory_curves, memory_location, memory_rows, memory_table
from ddpcheck.reports.views.table import Table
from ddpcheck.reports.views.timeseries import Values, series_table


def memory(report: Report) -> Html | None:
    table = memory_table(report)
    return None if table is None else joined([view(table, heading=True), _curves(report)])


def _curves(report: Report) -> Html | None:
    rows, curves = memory_rows(report), memory_curves(report)
    if not curves:
        return None
    steps = sorted({step for curve in curves.values() for step, _ in curve})
    values = {rank: _held(curve, steps) for rank, curve in curves.items()}
    spec = {
        "x": steps,
        "yLabel": "MB",
        "unit": "MB",
        "chosen": chosen_ranks(report, values),
        "series": [{"label": f"rank {rank}", "rank": rank, "values": line} for rank, line in values.items()],
    }
    growing = sum(row["growth"] is not None for row in rows)
    growth = f"Memory of {counted(growing, 'rank')} grows steadily." if growing else "No rank grows steadily."
    table = series_table(
        {f"rank {rank}": line for rank, line in values.items()}, "Memory after each step", "MB"
    )
    caption = f"Memory {memory_location(rows)} after each step"
    return chart("lines", caption, growth, spec, rows_table(table, table.rows))


def _held(curve: Sequence[tuple[int, int]], steps: Sequence[int]) -> list[float | None]:
    """The sizes in MB at these steps; unknown before the first and after the last recorded one."""
    values: list[float | None] = []
    at, size = 0, None
    for step in steps:
        while at < len(curve) and curve[at][0] <= step:
            size = round(curve[at][1] / 1e6, 2)
            at += 1
        values.append(size if step <= curve[-1][0] else None)
    return values


_MOST_NODES = 4
# Rows and columns of the heat map; of more nodes those with the slowest links are drawn.
_MOST_HEAT_MAP_NODES = 32
# A link that is this many times slower, or more, has the darkest colour.
_DARKEST = 4.0


def traffic(report: Report) -> Html | None:
    table = traffic_table(report)
    return None if table is None else joined([tag("p", "Bytes per step."), view(table)])


def hardware(report: Report) -> Html | None:
    nodes = hardware_nodes(report)
    if not nodes:
        return None
    charts = [_charts(node) for node in nodes if (node.get("series") or {}).get("time")][:_MOST_NODES]
    return joined(
        [
            view(node_table(report)),
            view(gpu_table(report), heading=True),
            folded(nvlink_table(report)),
            folded(gpu_process_table(report)),
            *map(folded, topology_tables(report)[:_MOST_NODES]),
            *charts,
        ]
    )


def _charts(node: Mapping[str, Any]) -> Html:
    series = node["series"]
    began = series["time"][0]
    seconds = [round(time - began, 2) for time in series["time"]]
    rates: dict[str, Values] = {
        f"{link} {direction}": [round(rate / 1e6, 3) for rate in series[link][direction]]
        for link in ("network", "loopback")
        for direction in ("sent", "received")
    }
    use: dict[str, Values] = {"CPU": list(series["cpu"])}
    use |= {f"GPU {number}": list(gpu["busy"]) for number, gpu in enumerate(series["gpus"])}
    return joined(
        [
            _lines(f"{node['host']}: traffic", "MB/s", seconds, rates),
            _lines(f"{node['host']}: utilisation", "%", seconds, use),
        ]
    )


def _lines(title: str, unit: str, seconds: Sequence[float], values: Mapping[str, Values]) -> Html:
    spec = {
        "x": seconds,
        "xLabel": "seconds",
        "yLabel": unit,
        "unit": unit,
        "series": [{"label": label, "values": list(line)} for label, line in values.items()],
    }
    most = max((value for line in values.values() for value in line if value is not None), default=0.0)
    table = series_table(values, title, unit)
    return chart("lines", title, f"Maximum {most:.4g} {unit}.", spec, rows_table(table, table.rows))


def links(report: Report) -> Html | None:
    table, ports = link_table(report), port_table(report)
    if table is None and ports is None:
        return None
    heat_map = None if table is None else _heat_map(report, table)
    return joined([tag("p", link_summary(report)), heat_map, view(ports, heading=True)])


def _heat_map(report: Report, table: Table) -> Html:
    factors = slowdowns(report)
    nodes = _slowest_nodes(factors)
    spec = {
        "rows": [f"from {node}" for node in nodes],
        "columns": nodes,
        "xLabel": "to",
        "unit": "times slower than usual",
        "low": 1,
        "high": _DARKEST,
        "values": [[factors.get((source, target)) for target in nodes] for source in nodes],
    }
    usual = megabits_text(report.links["usual"])
    summary = f"The usual throughput is {usual} while busy. A grey line: nothing was sent that way."
    key = [("heat-1", "usual"), ("heat-4", "slower"), ("heat-6", f"{_DARKEST:g} times slower or more")]
    figures = rows_table(table, table.rows)
    return chart("grid", "Slowdown of each link against the usual throughput", summary, spec, figures, key)


def _slowest_nodes(factors: Mapping[tuple[str, str], float]) -> list[str]:
    worst: dict[str, float] = {}
    for pair, factor in factors.items():
        for node in pair:
            worst[node] = max(worst.get(node, 0.0), factor)
    return sorted(sorted(worst, key=lambda node: -worst[node])[:_MOST_HEAT_MAP_NODES])
