"""Start-up: each rank's stages to the end of its first step on one timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.reports.html.components import Html, chart, joined, pages, rows_table
from ddpcheck.reports.views.startup import STAGES, node_reads_table, startup_summary, startup_table

_COLOURS = ("absent", "line-6", "line-2", "line-5", "line-4", "line-8", "line-1", "line-7", "line-3")


def section(report: Report) -> Html | None:
    startup, table = report.startup, startup_table(report)
    if startup is None or table is None:
        return None
    rows = {row["rank"]: row for row in startup["ranks"]}
    starts = [row["began"] for row in rows.values()]
    began = min((start for start in starts if start is not None), default=0.0)
    shown = pages(list(rows), lambda rank: float(rows[rank]["total"] or 0.0), "time")
    labels = [title for _, _, title in STAGES]
    spec = {
        "unit": "s",
        "kinds": [
            {"label": label, "colour": colour, "share": 0.8}
            for label, colour in zip(labels, _COLOURS, strict=True)
        ],
        "windows": [
            {
                "rows": [f"rank {rank}" for rank in ranks],
                "spans": _spans([rows[rank] for rank in ranks], began),
            }
            for _, ranks in shown
        ],
    }
    figures = [rows_table(table, table.rows)]
    nodes = node_reads_table(report)
    figures += [] if nodes is None else [rows_table(nodes, nodes.rows)]
    choices = [title for title, _ in shown] if len(shown) > 1 else []
    key = list(zip(_COLOURS, labels, strict=True))
    caption = "From the start of Python to the end of the first step (s)"
    return chart("lanes", caption, startup_summary(startup), spec, joined(figures), key, choices)


def _spans(rows: Sequence[Mapping[str, Any]], began: float) -> list[list[object]]:
    """Stages one after the other, as they mostly happen; a script may read weights several times."""
    spans: list[list[object]] = []
    for number, row in enumerate(rows):
        start = (row["began"] - began) if row.get("began") is not None else 0.0
        for kind, (stage, _, _) in enumerate(STAGES):
            took = row.get(stage) or 0.0
            if took:
                spans.append([number, round(start, 4), round(start + took, 4), kind, _remark(row, stage)])
            start += took
    return spans


def _remark(row: Mapping[str, Any], stage: str) -> str:
    if stage != "wrap" or row.get("waited") is None:
        return ""
    return f"{row['waited']:.3g} s of it waiting for the last rank"
