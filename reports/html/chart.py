"""A chart on the page: caption, drawing, a summary in words, and its figures as a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.reports.html.markup import Html, embedded, tag
from ddpcheck.reports.verdict import in_order

_MOST_CHOSEN = 4
_HELP = "Drag to zoom, double-click to zoom out. By keyboard: arrows, + and -, Escape."


def chart(
    kind: str,
    caption: str,
    summary: str,
    spec: Mapping[str, Any],
    figures: Html,
    key: Sequence[tuple[str, str]] = (),
    choices: Sequence[str] = (),
) -> Html:
    """`summary` describes the drawing for people who cannot see it; `figures` is the table behind it.

    `key` lists colours and their meaning, `choices` the pages of the chart.
    """
    return tag(
        "figure",
        tag("figcaption", caption),
        tag("p", summary, class_="quiet"),
        colour_key(key) if key else None,
        _chooser(choices) if choices else None,
        _rank_input() if kind == "lines" else None,
        tag("button", "All ranks", type="button", class_="back", hidden="") if kind == "strip" else None,
        tag("div", class_="plot", role="img", aria_label=f"{caption}. {summary}"),
        tag("p", _HELP, class_="readout", data_rest=_HELP),
        tag("details", tag("summary", "As a table"), figures),
        embedded(spec),
        data_chart=kind,
    )


def chosen_ranks(report: Report, available: Collection[int]) -> list[int]:
    """Ranks of the most severe findings: the lines that a chart of many ranks shows first."""
    named = dict.fromkeys(rank for finding in in_order(report) for rank in finding.ranks)
    return [rank for rank in named if rank in available][:_MOST_CHOSEN]


def colour_key(entries: Sequence[tuple[str, str]]) -> Html:
    return tag("ul", *(tag("li", _swatch(colour), label) for colour, label in entries), class_="key")


def _swatch(colour: str) -> Html:
    square = tag("rect", width="16", height="12", class_=f"fill-{colour}")
    return tag("svg", square, viewBox="0 0 16 12", aria_hidden="true")


def _chooser(choices: Sequence[str]) -> Html:
    options = [tag("option", choice) for choice in choices]
    return tag("label", "Show ", tag("select", *options), class_="chooser")


def _rank_input() -> Html:
    """Shown only where there are too many ranks to draw a line for each."""
    field = tag("input", type="text", placeholder="3, 17-20")
    return tag("label", "Lines for ranks ", field, class_="asked", hidden="")
