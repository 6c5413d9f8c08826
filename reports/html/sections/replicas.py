"""Replicas over the steps: agreement as a strip of ranks and steps, gradient norms and the AllReduce error."""

from __future__ import annotations

from dataclasses import asdict

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timeseries.model import AgreementHistory, GradientHistory
from ddpcheck.reports.html.components import (
    MOST_CHART_ROWS,
    Html,
    chart,
    chosen_ranks,
    joined,
    rows_table,
    tag,
)
from ddpcheck.reports.views.ranks import agreement_summary, agreement_table
from ddpcheck.reports.views.timeseries import Values, error_summary, norm_summary, series_table

_MOST_INTERVALS = 200
_AGREEMENT_KEY = (
    ("ok", "agrees"),
    ("error", "differs from the majority (tall)"),
    ("warning", "differs, no majority (tall)"),
    ("absent", "no record (thin)"),
)


def agreement(report: Report) -> Html | None:
    histories = [history for history in report.agreement if history.stretches]
    if not histories:
        return None
    return joined(_strip(history, len(report.agreement) > 1) for history in histories)


def _strip(history: AgreementHistory, several: bool) -> Html:
    spec = {
        "ranks": list(history.ranks),
        "stretches": [asdict(interval) for interval in history.stretches],
    }
    summary = agreement_summary(history)
    if len(history.ranks) > MOST_CHART_ROWS:
        summary += " Each row shows several ranks: click a row, or press Enter, to expand it."
    table = agreement_table(history)
    drawing = chart(
        "strip",
        f"Parameters{_module(history, several)} after each step, by rank",
        summary,
        spec,
        rows_table(table, table.rows[:_MOST_INTERVALS]),
        _AGREEMENT_KEY,
    )
    cut = (
        tag("p", "Later changes are not shown: there were too many.", class_="quiet") if history.cut else None
    )
    return joined([drawing, cut])


def gradients(report: Report) -> Html | None:
    histories = [history for history in report.gradients if history.steps]
    several = len(histories) > 1
    charts = [
        part for history in histories for part in (_norms(report, history, several), _error(history, several))
    ]
    return joined(charts) if charts else None


def _norms(report: Report, history: GradientHistory, several: bool) -> Html:
    series = [
        {"label": f"rank {rank}", "rank": int(rank), "values": list(norms)}
        for rank, norms in history.local.items()
    ]
    spec = {
        "x": list(history.steps),
        "yLabel": "norm",
        "log": True,
        "chosen": chosen_ranks(report, set(map(int, history.local))),
        "series": [*series, {"label": "reduced", "values": list(history.reduced), "strong": True}],
    }
    figures: dict[str, Values] = {"reduced": history.reduced}
    figures |= {f"rank {rank}": norms for rank, norms in history.local.items()}
    table = series_table(figures, "Gradient norms")
    return chart(
        "lines",
        f"Gradient norms{_module(history, several)} before and after AllReduce",
        norm_summary(history),
        spec,
        rows_table(table, table.rows),
    )


def _error(history: GradientHistory, several: bool) -> Html | None:
    summary = error_summary(history)
    if not summary:
        return None
    spec = {
        "x": list(history.steps),
        "yLabel": "error / bound",
        "series": [
            {"label": "worst parameter", "values": list(history.off_mean)},
            {"label": "bound", "values": [1.0] * len(history.steps), "limit": True},
        ],
    }
    caption = f"AllReduce error / rounding bound{_module(history, several)} (above 1: wrong)"
    table = series_table({"worst parameter": history.off_mean}, "AllReduce error / rounding bound")
    return chart("lines", caption, summary, spec, rows_table(table, table.rows))


def _module(history: AgreementHistory | GradientHistory, several: bool) -> str:
    return f" of module {history.module} ({history.name})" if several else ""
