"""Loss and step time over the steps, with a mark where a finding begins."""

from __future__ import annotations

from ddpcheck.analysis.report import Report
from ddpcheck.reports.html.components import Html, chart, chosen_ranks, joined, rows_table
from ddpcheck.reports.views.timeseries import (
    StepSeries,
    finding_marks,
    loss_series,
    series_table,
    step_time_series,
)


def section(report: Report) -> Html | None:
    charts = [
        _drawn(report, "Loss", "", loss_series(report), "Mean over ranks at the steps where it was read."),
        _drawn(
            report,
            "Step time",
            "ms",
            step_time_series(report),
            "Each point is the maximum of an interval of steps, without ddpcheck's own time.",
        ),
    ]
    known = [each for each in charts if each is not None]
    return joined(known) if known else None


def _drawn(report: Report, title: str, unit: str, series: list[StepSeries], summary: str) -> Html | None:
    if not series:
        return None
    steps = sorted({step for each in series for step in each.steps})
    values = {each.label: dict(zip(each.steps, each.values, strict=True)) for each in series}
    lines = {label: [line.get(step) for step in steps] for label, line in values.items()}
    marks = [
        {"x": mark.step, "label": mark.label, "colour": mark.severity.value} for mark in finding_marks(report)
    ]
    ranks = {each.rank for each in series if each.rank is not None}
    spec = {
        "x": steps,
        "yLabel": unit or title.lower(),
        "unit": unit,
        "marks": marks,
        "chosen": chosen_ranks(report, ranks),
        "series": [
            {"label": each.label, "values": lines[each.label]}
            | ({} if each.rank is None else {"rank": each.rank})
            for each in series
        ],
    }
    if marks:
        names = ", ".join(dict.fromkeys(f"{mark['label']} at step {mark['x']}" for mark in marks))
        summary = f"{summary} Marked: {names}."
    table = series_table(lines, f"{title} over the steps", unit)
    caption = f"{title} over the steps{f' ({unit})' if unit else ''}"
    return chart("lines", caption, summary, spec, rows_table(table, table.rows))
