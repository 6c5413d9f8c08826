"""A table of ranks that stays short: the first rows are shown, the whole of it opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpcheck.reports.html.markup import Html, joined, table, tag

_MOST_SHOWN = 16
_MOST_AT_ALL = 2048


def folded_table(
    headers: Sequence[str],
    ranks: Sequence[Mapping[str, Any]],
    row: Callable[[Mapping[str, Any]], Sequence[object]],
    weight: Callable[[Mapping[str, Any]], float],
    label: str,
    numbers: Sequence[int] = (),
) -> Html:
    """All ranks where they are few; of many those with the most `weight`, and the rest behind a click."""
    if len(ranks) <= _MOST_SHOWN:
        return table(headers, map(row, ranks), label, numbers)
    heaviest = sorted(ranks, key=weight, reverse=True)[:_MOST_SHOWN]
    shown = sorted(heaviest, key=lambda rank: int(rank["rank"]))
    everyone = table(headers, map(row, ranks[:_MOST_AT_ALL]), f"{label}, all ranks", numbers)
    return joined(
        [
            tag("p", f"The {_MOST_SHOWN} ranks that stand out of {len(ranks)}:", class_="quiet"),
            table(headers, map(row, shown), label, numbers),
            tag("details", tag("summary", f"All {len(ranks)} ranks"), everyone),
        ]
    )
