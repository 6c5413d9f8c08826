"""Which ranks to draw where there are too many for a row each, and the others page by page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_ROWS = 48
_MOST_PAGES = 64

Row = Mapping[str, Any]


def pages(
    rows: Sequence[Row], weight: Callable[[Row], float], what: str, only_most: bool = False
) -> list[tuple[str, list[Row]]]:
    """Titles and rows: all in one, or first the ends of the order by `weight`, then everybody in turn.

    With `only_most` it is the upper end alone that comes first.
    """
    if len(rows) <= MOST_ROWS:
        return [("all ranks", list(rows))]
    ordered = sorted(rows, key=weight)
    half = MOST_ROWS // 2
    ends = sorted([*ordered[: 0 if only_most else half], *ordered[-half:]], key=lambda row: int(row["rank"]))
    extremes = "the most" if only_most else "the least and the most"
    by_rank = sorted(rows, key=lambda row: int(row["rank"]))
    blocks = [by_rank[at : at + MOST_ROWS] for at in range(0, len(by_rank), MOST_ROWS)][:_MOST_PAGES]
    titled = [(f"ranks {block[0]['rank']}-{block[-1]['rank']}", block) for block in blocks]
    return [(f"{half} ranks with {extremes} {what}", ends), *titled]
