"""A chart on the page: a caption, room for the drawing, what it says in words, and its figures as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddpcheck.reports.html.markup import Html, embedded, table, tag

_MOST_ROWS = 64


def series_table(series: Mapping[str, Sequence[float | None]], label: str, unit: str = "") -> Html:
    """One row a line; very many are cut, since each is in report.json."""
    rows = []
    for name, values in list(series.items())[:_MOST_ROWS]:
        known = [value for value in values if value is not None]
        if known:
            rows.append([name, *map(figure, (min(known), median(known), max(known), known[-1]))])
        else:
            rows.append([name, "-", "-", "-", "-"])
    if len(series) > _MOST_ROWS:
        rows.append([f"and {len(series) - _MOST_ROWS} more, in report.json", "", "", "", ""])
    of = f" ({unit})" if unit else ""
    headers = ("", f"least{of}", f"median{of}", f"most{of}", f"last{of}")
    return table(headers, rows, label, numbers=(1, 2, 3, 4))


def figure(value: float) -> str:
    return f"{value:.4g}"


_HELP = "Drag to zoom, double-click to zoom out. By keyboard: arrows, + and -, Escape."


def chart(
    kind: str,
    caption: str,
    said: str,
    spec: Mapping[str, Any],
    figures: Html,
    key: Sequence[tuple[str, str]] = (),
    choices: Sequence[str] = (),
) -> Html:
    """`said` is what a person who cannot see the drawing is told of it; `figures` the table behind it.

    `key` lists colours and what they stand for, `choices` what can be looked at one at a time.
    """
    return tag(
        "figure",
        tag("figcaption", caption),
        tag("p", said, class_="quiet"),
        colour_key(key) if key else None,
        _chooser(choices) if choices else None,
        _asked() if kind == "lines" else None,
        tag("button", "All ranks", type="button", class_="back", hidden="") if kind == "strip" else None,
        tag("div", class_="plot", role="img", aria_label=f"{caption}. {said}"),
        tag("p", _HELP, class_="readout", data_rest=_HELP),
        tag("details", tag("summary", "As a table"), figures),
        embedded(spec),
        data_chart=kind,
    )


def colour_key(entries: Sequence[tuple[str, str]]) -> Html:
    return tag("ul", *(tag("li", _swatch(colour), label) for colour, label in entries), class_="key")


def _swatch(colour: str) -> Html:
    square = tag("rect", width="16", height="12", class_=f"fill-{colour}")
    return tag("svg", square, viewBox="0 0 16 12", aria_hidden="true")


def _chooser(choices: Sequence[str]) -> Html:
    options = [tag("option", choice) for choice in choices]
    return tag("label", "Show ", tag("select", *options), class_="chooser")


def _asked() -> Html:
    """Shown only where there are too many ranks for a line each."""
    field = tag("input", type="text", placeholder="3, 17-20")
    return tag("label", "Lines for ranks ", field, class_="asked", hidden="")
