"""Agreement over the steps: a strip of ranks and steps for each module."""

from __future__ import annotations

from dataclasses import asdict

from ddpcheck.analysis.timeseries.model import AgreementHistory, AgreementInterval
from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.html.chart import chart
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag

_MOST_ROWS = 200
_KEY = (
    ("ok", "agrees"),
    ("error", "differs from the majority (tall)"),
    ("warning", "differ, without a majority (tall)"),
    ("absent", "nothing recorded (thin)"),
)


def section(made: PageContext) -> Html | None:
    drawn = [
        _strip(history, len(made.report.agreement)) for history in made.report.agreement if history.stretches
    ]
    return joined(drawn) if drawn else None


def _strip(history: AgreementHistory, modules: int) -> Html:
    which = f" of module {history.module} ({history.name})" if modules > 1 else ""
    spec = {
        "ranks": list(history.ranks),
        "stretches": [asdict(stretch) for stretch in history.stretches],
    }
    many = (
        " Rows stand for several ranks: click one, or press Enter, to open it."
        if len(history.ranks) > 48
        else ""
    )
    drawing = chart(
        "strip",
        f"Parameters{which} after each step: ranks and steps",
        _said(history) + many,
        spec,
        _table(history),
        _KEY,
    )
    cut = tag("p", "There were more changes than are kept.", class_="quiet") if history.cut else None
    return joined([drawing, cut])


def _said(history: AgreementHistory) -> str:
    parted = [stretch for stretch in history.stretches if stretch.odd]
    if not parted:
        compared = sum(stretch.compared for stretch in history.stretches)
        return f"All {len(history.ranks)} ranks agreed in all {compared} comparisons."
    first = parted[0]
    who = name_ranks(first.odd) + ("" if first.majority else ", without a majority")
    return f"Ranks differ from {_when(first.first)} on ({who})."


def _table(history: AgreementHistory) -> Html:
    rows = [
        [_span(stretch), stretch.compared, _outcome(stretch), rank_ranges(stretch.absent)]
        for stretch in history.stretches[:_MOST_ROWS]
    ]
    headers = ("steps", "compared", "ranks that differ", "nothing recorded of")
    return table(headers, rows, "Agreement by stretches of steps", numbers=(1,))


def _outcome(stretch: AgreementInterval) -> str:
    if not stretch.odd:
        return "none"
    return rank_ranges(stretch.odd) + ("" if stretch.majority else " (no majority)")


def _span(stretch: AgreementInterval) -> str:
    if stretch.first == stretch.last:
        return _when(stretch.first)
    return f"{_when(stretch.first)} to {stretch.last}"


def _when(step: int) -> str:
    return "wrapping" if step < 0 else f"step {step}"
