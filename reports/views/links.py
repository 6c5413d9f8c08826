"""Links between nodes: throughput while busy, retransmits and round trips; and InfiniBand ports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import megabits_text, optional_size_text
from ddpcheck.reports.views.table import Column, Row, Table, known, numbers, row


def link_table(report: Report) -> Table | None:
    """The slowest links first; None for a job on one node."""
    links = sorted(report.links.get("links") or (), key=lambda link: link["bandwidth"])
    if not links:
        return None
    columns = (
        Column("from"),
        Column("to"),
        Column("addresses", detail=True),
        Column("throughput", number=True),
        Column("busy", "share of time busy", number=True),
        Column("per step", "sent per step", number=True),
        Column("retransmits", number=True),
        Column("min RTT", "minimum round trip", number=True),
    )
    rows = tuple(_link_row(link) for link in links)
    return Table("Links", columns, rows, subtitle="throughput while busy", noun="links")


def _link_row(link: Mapping[str, Any]) -> Row:
    return row(
        [
            link["source"],
            link["target"],
            f"{link['source_address']} to {link['target_address']}",
            megabits_text(link["bandwidth"]),
            f"{100 * link['busy_share']:.0f} %",
            optional_size_text(round(link["bytes"] / link["steps"])) if link["steps"] else None,
            link["retransmits"],
            f"{link['min_rtt_us'] / 1000:.3g} ms",
        ],
        weight=-link["bandwidth"],
    )


def port_table(report: Report) -> Table | None:
    """None without InfiniBand."""
    ports = report.links.get("ports") or ()
    if not ports:
        return None
    columns = (
        Column("port"),
        *numbers(("rate", "sent", "received", "errors")),
        Column("wait ticks", number=True),
    )
    rows = tuple(
        row(
            [
                f"{port['node']} {port['name']}",
                known(port["speed"], lambda speed: f"{speed / 1000:g} Gbit/s"),
                optional_size_text(port["sent"]),
                optional_size_text(port["received"]),
                port["errors"],
                port["waited"],
            ],
            weight=port["errors"],
        )
        for port in ports
    )
    return Table("InfiniBand ports", columns, rows, noun="ports")


def link_summary(report: Report) -> str:
    """Whether a link is slow."""
    slow = report.links.get("slow")
    if slow is None:
        return "No link is an outlier."
    return (
        f"{' to '.join(slow['nodes'])} is slow: {megabits_text(slow['bandwidth'])} while busy; the other links have "
        f"{megabits_text(slow['usual'])}, {slow['factor']:.2g} times as much."
    )


def slowdowns(report: Report) -> dict[tuple[str, str], float]:
    """How many times slower than usual each pair of nodes is; of several interfaces the slowest."""
    usual = report.links.get("usual") or 0.0
    factors: dict[tuple[str, str], float] = {}
    for link in report.links.get("links") or ():
        pair = link["source"], link["target"]
        factors[pair] = max(factors.get(pair, 0.0), round(usual / max(link["bandwidth"], 1), 3))
    return factors
