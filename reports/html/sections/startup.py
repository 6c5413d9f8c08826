"""The start of the job: each rank's way to the end of its first step, on one timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.formatting import optional_size_text, rank_ranges
from ddpcheck.reports.html.chart import chart
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table
from ddpcheck.reports.html.table import Row, pages

# In the order in which they come.
_STAGES = (
    ("interpreter", "start of Python", "absent"),
    ("torch", "importing torch", "line-6"),
    ("group", "process group", "line-2"),
    ("load", "reading weights", "line-5"),
    ("copy", "copying to the device", "line-4"),
    ("script", "the script", "line-8"),
    ("wrap", "wrapping in DDP", "line-1"),
    ("batch", "first batch", "line-7"),
    ("step", "first step", "line-3"),
)


def section(made: PageContext) -> Html | None:
    startup = made.document.get("startup")
    if not startup or not startup["ranks"]:
        return None
    ranks = startup["ranks"]
    began = min((rank["began"] for rank in ranks if rank.get("began") is not None), default=0.0)
    shown = pages(ranks, lambda row: float(row["total"] or 0.0), "time")
    spec = {
        "unit": "s",
        "kinds": [{"label": label, "colour": colour, "share": 0.8} for _, label, colour in _STAGES],
        "windows": [
            {"rows": [f"rank {row['rank']}" for row in rows], "spans": _spans(rows, began)}
            for _, rows in shown
        ],
    }
    totals = [rank["total"] for rank in ranks if rank["total"] is not None]
    slowest = f" The slowest rank took {max(totals):.4g} s to the end of its first step." if totals else ""
    headers = ("rank", "host", *(label for _, label, _ in _STAGES), "total")
    figures = table(
        headers, [_row(rank) for rank in ranks], "Seconds by stage", numbers=range(2, len(headers))
    )
    nodes = startup.get("nodes") or []
    if len(nodes) > 1:
        figures = joined([figures, _by_node(nodes)])
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    key = [(colour, label) for _, label, colour in _STAGES]
    return chart(
        "lanes",
        "From the start of Python to the first step",
        f"{startup['summary']}{slowest}",
        spec,
        figures,
        key,
        choices,
    )


def _by_node(nodes: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        [
            node["host"],
            rank_ranges(node["ranks"]),
            optional_size_text(node["loaded_bytes"]),
            optional_size_text(node["storage_bytes"]),
            optional_size_text(node["repeated_bytes"]),
        ]
        for node in nodes
    ]
    headers = ("host", "ranks", "read", "of it from storage", "read by several of its ranks")
    return table(headers, rows, "Bytes read by node", numbers=(2, 3, 4))


def _spans(rows: Sequence[Row], began: float) -> list[list[object]]:
    """One after the other, as they mostly come; a script may read weights in several goes."""
    spans: list[list[object]] = []
    for number, row in enumerate(rows):
        at = (row["began"] - began) if row.get("began") is not None else 0.0
        for kind, (stage, _, _) in enumerate(_STAGES):
            took = row.get(stage) or 0.0
            if took:
                spans.append([number, round(at, 4), round(at + took, 4), kind, _more(row, stage)])
            at += took
    return spans


def _more(row: Row, stage: str) -> str:
    if stage != "wrap" or row.get("waited") is None:
        return ""
    return f"{row['waited']:.3g} s of it waiting for the last rank"


def _row(rank: Mapping[str, Any]) -> list[object]:
    stages = [rank.get(stage) for stage, _, _ in _STAGES]
    return [
        f"rank {rank['rank']}",
        rank["host"],
        *("-" if seconds is None else f"{seconds:.3f}" for seconds in (*stages, rank["total"])),
    ]
