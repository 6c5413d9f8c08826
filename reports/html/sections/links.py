"""Links between nodes: a heat map of how much slower each link is than usual."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import megabits_text
from ddpcheck.reports.html.chart import chart
from ddpcheck.reports.html.markup import Html, joined, tag
from ddpcheck.reports.html.table import rows_table, view
from ddpcheck.reports.views.links import link_summary, link_table, port_table, slowdowns
from ddpcheck.reports.views.table import Table

# Rows and columns of the heat map; of more nodes those with the slowest links are drawn.
_MOST_NODES = 32
# A link that is this many times slower, or more, has the darkest colour.
_DARKEST = 4.0


def section(report: Report) -> Html | None:
    links, ports = link_table(report), port_table(report)
    if links is None and ports is None:
        return None
    heat_map = None if links is None else _heat_map(report, links)
    return joined([tag("p", link_summary(report)), heat_map, view(ports, heading=True)])


def _heat_map(report: Report, links: Table) -> Html:
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
    figures = rows_table(links, links.rows)
    return chart("grid", "Slowdown of each link against the usual throughput", summary, spec, figures, key)


def _slowest_nodes(factors: Mapping[tuple[str, str], float]) -> list[str]:
    worst: dict[str, float] = {}
    for pair, factor in factors.items():
        for node in pair:
            worst[node] = max(worst.get(node, 0.0), factor)
    return sorted(sorted(worst, key=lambda node: -worst[node])[:_MOST_NODES])
