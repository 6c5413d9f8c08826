"""The links between nodes: what each gave while the job asked it, the slowest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.units import megabits_text
from ddpcheck.reports.terminal.console import LABEL, Ink, indented
from ddpcheck.reports.trace_units import size_text

_MOST_ROWS = 8


def put_links(ink: Ink, report: Report) -> None:
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
        size_text(round(link["bytes"] / link["steps"])) if link["steps"] else "-",
        f"{link['retransmits']}",
        f"{link['min_rtt_us'] / 1000:.3g} ms",
    ]


def _port(port: Mapping[str, Any]) -> list[object]:
    return [
        f"{port['node']} {port['name']}",
        "-" if port["speed"] is None else f"{port['speed'] / 1000:g} Gbit/s",
        size_text(port["sent"]),
        f"{port['errors']}",
        f"{port['waited']} ticks",
    ]
