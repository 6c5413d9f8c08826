"""Start-up: each rank's time to the end of its first step by stage, and what was read and copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import rank_ranges, seconds_text, size_text
from ddpcheck.reports.views.table import Column, Row, Table, known, row

if TYPE_CHECKING:
    from ddpcheck.analysis.startup.table import StartupTable

# A smaller model starts in a time that says nothing about its weights.
_LEAST_BYTES = 10_000_000
# Key in report.json, the label for a terminal, and the label where there is room; in the order they happen.
STAGES = (
    ("interpreter", "python", "Python start"),
    ("torch", "torch", "import torch"),
    ("group", "group", "process group"),
    ("load", "load", "read weights"),
    ("copy", "copy", "copy to device"),
    ("script", "script", "other script code"),
    ("wrap", "wrap", "wrap in DDP"),
    ("batch", "batch", "first batch"),
    ("step", "step", "first step"),
)


def startup_table(report: Report) -> Table | None:
    """Slow ranks weigh most; None if no rank recorded its start."""
    startup = report.startup
    if startup is None or not startup["ranks"]:
        return None
    copied = bool(startup["copied_bytes"])
    columns = (
        Column("rank"),
        Column("host", detail=True),
        *(
            Column(label, title, number=True, detail=stage == "copy" and not copied)
            for stage, label, title in STAGES
        ),
        Column("read", "bytes read", number=True),
        Column("total", number=True),
    )
    return Table(
        "Start-up",
        columns,
        tuple(_row(rank) for rank in startup["ranks"]),
        subtitle="s, slowest ranks" if len(startup["ranks"]) > 8 else "s",
        notes=tuple(filter(None, (startup["summary"], _transfers(startup)))),
        noun="ranks",
        total=startup.get("of") or len(startup["ranks"]),
        minor=max(startup["broadcast_bytes"], startup["loaded_bytes"]) < _LEAST_BYTES,
    )


def node_reads_table(report: Report) -> Table | None:
    """What each node read; None for a single node."""
    nodes = (report.startup.get("nodes") or []) if report.startup else []
    if len(nodes) < 2:
        return None
    columns = (
        Column("host"),
        Column("ranks"),
        Column("read", number=True),
        Column("from storage", number=True),
        Column("read by several ranks", number=True),
    )
    rows = tuple(
        row(
            [
                node["host"],
                rank_ranges(node["ranks"]),
                size_text(node["loaded_bytes"]),
                size_text(node["storage_bytes"]),
                size_text(node["repeated_bytes"]),
            ]
        )
        for node in nodes
    )
    return Table("Bytes read by node", columns, rows, noun="nodes")


def startup_summary(startup: StartupTable) -> str:
    """The summary, with the slowest rank."""
    totals = [rank["total"] for rank in startup["ranks"] if rank["total"] is not None]
    slowest = f"The slowest rank needed {max(totals):.2f} s to the end of its first step." if totals else ""
    return " ".join(filter(None, (startup["summary"], slowest)))


def _row(rank: Mapping[str, Any]) -> Row:
    seconds = [known(rank.get(stage), "{:.2f}".format) for stage, _, _ in STAGES]
    read = size_text(rank["loaded_bytes"]) if rank["loaded_bytes"] else None
    total = known(rank["total"], "{:.2f}".format)
    values = [rank["rank"], rank["host"], *seconds, read, total]
    return row(values, weight=rank["total"] or 0.0, ranks=[rank["rank"]])


def _transfers(startup: StartupTable) -> str:
    sentences = []
    if startup["copied_bytes"]:
        rate = f" at {size_text(startup['copy_rate'])}/s" if startup["copy_rate"] else ""
        sentences.append(f"{size_text(startup['copied_bytes'])} were copied to devices{rate}.")
    if startup["broadcast_bytes"] and startup["broadcast_seconds"] is not None:
        rate = f" ({size_text(startup['broadcast_rate'])}/s)" if startup["broadcast_rate"] else ""
        took = seconds_text(startup["broadcast_seconds"])
        sentences.append(f"The broadcast of {size_text(startup['broadcast_bytes'])} took {took}{rate}.")
    return " ".join(sentences)
