"""Builds HTML. Every text is escaped unless it is markup from this module."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ddpcheck.reports.safe_text import safe_line

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
