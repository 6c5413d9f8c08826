"""Gradients over the steps: what each rank computed, what the reduction made of it, and whether that is the mean."""

from __future__ import annotations

from ddpcheck.analysis.timeseries.model import GradientHistory
from ddpcheck.reports.html.chart import chart, series_table
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined

_FIRST_CHOSEN = 4


def section(made: PageContext) -> Html | None:
    histories = [history for history in made.report.gradients if history.steps]
    several = len(histories) > 1
    drawn = [
        part
        for history in histories
        for part in (_norms(made, history, several), _off_mean(history, several))
    ]
    return joined(drawn) if drawn else None


def _norms(made: PageContext, history: GradientHistory, several: bool) -> Html:
    series = [
        {"label": f"rank {rank}", "rank": int(rank), "values": list(norms)}
        for rank, norms in history.local.items()
    ]
    chosen = [rank for rank in made.named_ranks if str(rank) in history.local][:_FIRST_CHOSEN]
    spec = {
        "x": list(history.steps),
        "yLabel": "norm",
        "log": True,
        "chosen": chosen,
        "series": [*series, {"label": "reduced", "values": list(history.reduced), "strong": True}],
    }
    figures = {f"rank {rank}": norms for rank, norms in history.local.items()}
    return chart(
        "lines",
        f"Norm of the gradients{_of(history, several)}, before and after the reduction",
        f"Known to within a fifth, from sketches{_each(history)}. A mean of unlike gradients is shorter than they are.",
        spec,
        series_table({"reduced": history.reduced, **figures}, "Norms of the gradients"),
    )


def _off_mean(history: GradientHistory, several: bool) -> Html | None:
    known = [value for value in history.off_mean if value is not None]
    if not known:
        return None
    beyond = sum(value > 1 for value in known)
    said = (
        f"Above 1, at {beyond} of {len(known)} points, rounding is no explanation."
        if beyond
        else f"Always below 1, {max(known):.2g} at most: rounding explains it."
    )
    spec = {
        "x": list(history.steps),
        "yLabel": "share",
        "series": [
            {"label": "worst parameter", "values": list(history.off_mean)},
            {"label": "limit", "values": [1.0] * len(history.steps), "limit": True},
        ],
    }
    caption = (
        f"Distance of the reduced gradients{_of(history, several)} from the mean, over what rounding explains"
    )
    return chart(
        "lines", caption, said, spec, series_table({"worst parameter": history.off_mean}, "Distance")
    )


def _of(history: GradientHistory, several: bool) -> str:
    return f" of module {history.module} ({history.name})" if several else ""


def _each(history: GradientHistory) -> str:
    return f"; each point is the largest of {history.every} steps" if history.every > 1 else ""
