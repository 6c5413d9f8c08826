"""Memory: what each rank holds by category, and its memory after each step."""

from __future__ import annotations

from ddpcheck.analysis.report import Report
from ddpcheck.reports.html.components import Html, chart, chosen_ranks, joined, rows_table, view
from ddpcheck.reports.verdict import counted
from ddpcheck.reports.views.memory import memory_location, memory_rows, memory_table
from ddpcheck.reports.views.timeseries import series_table


def section(report: Report) -> Html | None:
    table = memory_table(report)
    return None if table is None else joined([view(table, heading=True), _curves(report)])


def _curves(report: Report) -> Html | None:
    rows = [row for row in memory_rows(report) if row["curve"]]
    if not rows:
        return None
    steps = sorted({step for row in rows for step, _ in row["curve"]})
    curves = {row["rank"]: {step: round(size / 1e6, 2) for step, size in row["curve"]} for row in rows}
    values = {rank: [curve.get(step) for step in steps] for rank, curve in curves.items()}
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
