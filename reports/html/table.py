"""Views as tables of the page: the most notable rows are shown, all rows behind a click."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.views.table import Cell, Column, Row, Table, heaviest

# Rows of a table that is shown, of one that is folded, and of a chart with a row for each rank.
_MOST_SHOWN = 16
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
