"""Traffic: bytes a step over each kind of link, measured beside what the reduction has to move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpcheck.formatting import optional_size_text, rank_ranges
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, tag
from ddpcheck.reports.html.table import folded_nodes


def section(made: PageContext) -> Html | None:
    traffic = made.document.get("traffic") or {}
    nodes = traffic.get("nodes") or []
    if not nodes:
        return None
    said = f"A step reduces {optional_size_text(traffic['gradient_bytes'])} of gradients over {traffic['backend']}."
    if traffic.get("expected") is not None:
        said += f" All ranks together have to send {optional_size_text(traffic['expected'])}."
    headers = ("host", "ranks", "link", "sent", "received", "has to be")
    why_not = tag("p", traffic["why_not"], class_="quiet") if traffic.get("why_not") else None
    figures = folded_nodes(headers, nodes, _rows, _off, "Bytes a step", numbers=(3, 4, 5))
    return joined([tag("p", said), figures, why_not])


def _off(node: Mapping[str, Any]) -> float:
    """By how much it sent more or less than it had to, over the kinds of links of which that is known."""
    told = [moved for moved in node["classes"].values() if moved["expected"]]
    return max((abs(moved["sent"] / moved["expected"] - 1) for moved in told), default=0.0)


def _rows(node: Mapping[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for kind, moved in node["classes"].items():
        names = ", ".join(str(link["name"]) for link in node["links"] if link["class"] == kind)
        rows.append(
            [
                node["host"],
                rank_ranges(node["ranks"]),
                f"{kind} ({names})" if names else kind,
                optional_size_text(moved["sent"]),
                optional_size_text(moved["received"]),
                optional_size_text(moved["expected"]) or "-",
            ]
        )
    return rows
