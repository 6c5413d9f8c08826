"""Parts of the page: escaped markup, charts, and tables that show notable rows first and all rows behind a click."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.verdict import in_order
from ddpcheck.reports.views.table import Cell, Column, Row, Table, heaviest

_EMPTY = frozenset({"meta", "br", "rect", "input"})


class Html(str):
    """Markup made by this module; every other string is text and gets escaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escaped text; control characters are made visible, line breaks are kept."""
    if isinstance(value, Html):
        return value
    lines = str(value).split("\n")
    return Html("<br>".join(html.escape(safe_line(line)) for line in lines))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element; `class_` and `for_` lose their underscore, other underscores become dashes, None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(safe_line(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def joined(parts: Iterable[object]) -> Html:
    return Html("".join(text(part) for part in parts if part is not None))


def embedded(data: Any) -> Html:
    """Data for the page's script. No text in it can end the element: `<` is written as an escape."""
    document = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<>&":
        document = document.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json">{document}</script>')


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], label: str, numbers: Sequence[int] = ()
) -> Html:
    """A table that scrolls by itself on a narrow screen; columns in `numbers` are right-aligned.

    The first cell of a row is its heading.
    """
    head = tag(
        "tr",
        *(
            tag("th", title, scope="col", class_="number" if index in numbers else None)
            for index, title in enumerate(headers)
        ),
    )
    body = [_row(row, numbers) for row in rows]
    inner = tag("table", tag("thead", head) if any(headers) else None, tag("tbody", *body))
    return tag("div", inner, class_="scroll", role="region", tabindex="0", aria_label=label)


def _row(cells: Sequence[object], numbers: Sequence[int]) -> Html:
    first, *rest = cells
    return tag(
        "tr",
        first if is_cell(first) else tag("th", first, scope="row", class_="number" if 0 in numbers else None),
        *(
            cell if is_cell(cell) else tag("td", cell, class_="number" if index in numbers else None)
            for index, cell in enumerate(rest, start=1)
        ),
    )


def is_cell(value: object) -> bool:
    return isinstance(value, Html) and value.startswith(("<td", "<th"))


_MOST_CHOSEN = 4
CHART_HELP = "Drag to zoom, double-click to zoom out. By keyboard: arrows, + and -, Escape."


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
        tag("p", class_="readout", data_rest=""),
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


# Rows of a table that is shown, of one that is folded, and of a chart with a row for each rank.
_MOST_SHOWN = 8
_MOST_FOLDED = 2048
MOST_CHART_ROWS = 48
_MOST_PAGES = 64


def view(table_view: Table | None, heading: bool = False, most: int = _MOST_SHOWN) -> Html | None:
    """A view with its legend and notes; rows beyond `most` are folded. Nothing for None."""
    if table_view is None:
        return None
    shown = heaviest(table_view.rows, most)
    title = ", ".join(filter(None, (table_view.title, table_view.subtitle)))
    return joined(
        [
            tag("h3", title) if heading else None,
            tag("p", table_view.legend, class_="quiet") if table_view.legend else None,
            _excerpt(table_view, len(shown)),
            rows_table(table_view, shown) if shown else None,
            _folded(table_view) if len(shown) < len(table_view.rows) else None,
            folded(table_view.every),
            *(tag("p", note) for note in table_view.notes),
        ]
    )


def folded(table_view: Table | None) -> Html | None:
    """A view behind its title."""
    if table_view is None or not table_view.rows:
        return None
    return tag(
        "details", tag("summary", table_view.title), rows_table(table_view, table_view.rows[:_MOST_FOLDED])
    )


def rows_table(table_view: Table, rows: Sequence[Row]) -> Html:
    """These rows of a view, with all its columns."""
    numbers = [index for index, column in enumerate(table_view.columns) if column.number]
    headers = [column.full_label for column in table_view.columns]
    cells = [
        [
            _cell(cell, column, heading=index == 0)
            for index, (cell, column) in enumerate(zip(row.cells, table_view.columns, strict=True))
        ]
        for row in rows
    ]
    label = ", ".join(filter(None, (table_view.title.rstrip(":"), table_view.subtitle)))
    return table(headers, cells, label, numbers)


def pages(
    ranks: Sequence[int], weight: Callable[[int], float], what: str, only_most: bool = False
) -> list[tuple[str, list[int]]]:
    """Titles and ranks of a chart's pages: all ranks on one, or first both ends by `weight`, then all in order.

    With `only_most` the first page has the upper end only.
    """
    if len(ranks) <= MOST_CHART_ROWS:
        return [("all ranks", list(ranks))]
    by_weight = sorted(ranks, key=weight)
    half = MOST_CHART_ROWS // 2
    ends = sorted([*by_weight[: 0 if only_most else half], *by_weight[-half:]])
    extremes = "the most" if only_most else "the least and the most"
    in_order = sorted(ranks)
    blocks = [in_order[start : start + MOST_CHART_ROWS] for start in range(0, len(in_order), MOST_CHART_ROWS)]
    titled = [(f"ranks {block[0]}-{block[-1]}", block) for block in blocks[:_MOST_PAGES]]
    return [(f"{half} ranks with {extremes} {what}", ends), *titled]


def _excerpt(view: Table, shown: int) -> Html | None:
    if shown >= len(view.rows):
        return None
    return tag("p", f"The {shown} most notable of {view.count} {view.noun}:", class_="quiet")


def _folded(view: Table) -> Html:
    rows = view.rows[:_MOST_FOLDED]
    title = (
        f"All {len(rows)} {view.noun}"
        if len(rows) >= view.count
        else f"{len(rows)} of {view.count} {view.noun}"
    )
    return tag("details", tag("summary", title), rows_table(view, rows))


def _cell(cell: Cell, column: Column, heading: bool) -> Html | str:
    """Text, or a whole table cell where it is highlighted."""
    if heading or (cell.mark is None and not column.code):
        return cell.plain
    mark = cell.mark.value if cell.mark is not None else None
    badge = tag("span", cell.badge, class_=f"badge {mark}") if cell.badge else None
    text = tag("code", cell.text) if column.code and cell.text else cell.text
    classes = " ".join(filter(None, ("number" if column.number else "", mark if badge is None else "")))
    return tag("td", badge, text, class_=classes or None)
