"""Links between nodes: a heat map of how much slower each was than the usual one while it was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.formatting import megabits_text, optional_size_text
from ddpcheck.reports.html.chart import chart
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag

# Rows and columns of the heat map; of more nodes those with the slowest links are drawn.
_MOST_NODES = 32
_MOST_PORTS = 128
# A link this many times slower has the darkest colour, however slow it is.
_DARKEST = 4.0
_PORT_HEADERS = ("port", "rate", "sent", "received", "errors", "waited, ticks")


def section(made: PageContext) -> Html | None:
    found = made.document.get("links") or {}
    links, ports = found.get("links") or [], found.get("ports") or []
    if not links and not ports:
        return None
    return joined(
        [_said(found), _map(links, found["usual"]) if links else None, _ports(ports) if ports else None]
    )


def _said(found: Mapping[str, Any]) -> Html:
    slow = found.get("slow")
    if slow is None:
        return tag("p", "No link stands out.")
    who = " to ".join(slow["nodes"])
    return tag(
        "p",
        f"{who} gave {megabits_text(slow['bandwidth'])} while asked, the others "
        f"{megabits_text(slow['usual'])}: {slow['factor']:.2g} times as much.",
    )


def _map(links: Sequence[Mapping[str, Any]], usual: float) -> Html:
    slowness = _slowness(links, usual)
    nodes = _drawn(slowness)
    spec = {
        "rows": [f"from {node}" for node in nodes],
        "columns": nodes,
        "xLabel": "to",
        "unit": "times slower than usual",
        "low": 1,
        "high": _DARKEST,
        "values": [[slowness.get((source, target)) for target in nodes] for source in nodes],
    }
    said = f"Usual is {megabits_text(usual)} while asked. A grey line: nothing was sent that way."
    key = [
        ("heat-1", "as usual"),
        ("heat-4", "slower"),
        ("heat-6", f"{_DARKEST:g} times or more"),
    ]
    return chart("grid", "How much slower each link was", said, spec, _figures(links), key)


def _slowness(links: Sequence[Mapping[str, Any]], usual: float) -> dict[tuple[str, str], float]:
    """By nodes; of several cards between two nodes the slowest."""
    found: dict[tuple[str, str], float] = {}
    for link in links:
        pair = link["source"], link["target"]
        found[pair] = max(found.get(pair, 0.0), round(usual / max(link["bandwidth"], 1), 3))
    return found


def _drawn(slowness: Mapping[tuple[str, str], float]) -> list[str]:
    worst: dict[str, float] = {}
    for pair, value in slowness.items():
        for node in pair:
            worst[node] = max(worst.get(node, 0.0), value)
    return sorted(sorted(worst, key=lambda node: -worst[node])[:_MOST_NODES])


def _figures(links: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        [
            f"{link['source']} to {link['target']}",
            f"{link['source_address']} to {link['target_address']}",
            megabits_text(link["bandwidth"]),
            f"{100 * link['busy_share']:.0f} %",
            optional_size_text(round(link["bytes"] / link["steps"])) if link["steps"] else "-",
            link["retransmits"],
            f"{link['min_rtt_us'] / 1000:.3g} ms",
        ]
        for link in links
    ]
    headers = (
        "link",
        "addresses",
        "gave",
        "busy",
        "sent a step",
        "packets sent again",
        "shortest round trip",
    )
    return table(headers, rows, "Links between nodes", numbers=(2, 3, 4, 5, 6))


def _ports(ports: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        [
            f"{port['node']} {port['name']}",
            "-" if port["speed"] is None else f"{port['speed'] / 1000:g} Gbit/s",
            optional_size_text(port["sent"]),
            optional_size_text(port["received"]),
            port["errors"],
            port["waited"],
        ]
        for port in ports[:_MOST_PORTS]
    ]
    return table(_PORT_HEADERS, rows, "InfiniBand ports", numbers=(1, 2, 3, 4, 5))
