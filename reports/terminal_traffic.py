"""Who moved what: bytes a step over each kind of link, measured and expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.reports.terminal.console import LABEL, Ink, indented
from ddpcheck.reports.trace_units import size_text

_MOST_NODES = 8


def put_traffic(ink: Ink, report: Report) -> None:
    """A row for each kind of link that moved something, or should have."""
    nodes = report.traffic.get("nodes", ())
    rows = [row for node in nodes[:_MOST_NODES] for row in _rows(node)]
    if not rows:
        return
    ink.gap()
    headers = ["node", "link", "sent", "received", "expected", "steps"]
    ink.put(ink.text("Traffic, bytes a step", LABEL), indented(ink.columns(headers, rows)))
    if len(nodes) > _MOST_NODES:
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
                size_text(moved["sent"]),
                size_text(moved["received"]),
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
    return f"{size_text(expected)} ({100 * moved['sent'] / expected:.0f} %)"


def _named(node: Mapping[str, Any], kind: str) -> str:
    """The kind of link, and which one where it is one alone."""
    used = [
        link["name"] for link in node["links"] if link["class"] == kind and link["sent"] + link["received"]
    ]
    return f"{kind} {used[0]}" if len(used) == 1 and kind in ("network", "infiniband") else kind
