"""A table of ranks or nodes that stays short: the first rows are shown, the whole of it opens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddpcheck.reports.html.markup import Html, joined, table, tag

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


_MOST_SHOWN = 16
_MOST_AT_ALL = 2048
_MOST_NODES = 8

Given = Mapping[str, Any]


def folded_table(
    headers: Sequence[str],
    ranks: Sequence[Given],
    row: Callable[[Given], Sequence[object]],
    weight: Callable[[Given], float],
    label: str,
    numbers: Sequence[int] = (),
    of: int = 0,
) -> Html:
    """All ranks where they are few; of many those with the most `weight`, and the rest behind a click.

    `of`: how many ranks there are, where those given are not all.
    """
    if len(ranks) <= _MOST_SHOWN:
        return table(headers, map(row, ranks), label, numbers)
    heaviest = sorted(ranks, key=weight, reverse=True)[:_MOST_SHOWN]
    shown = sorted(heaviest, key=lambda rank: int(rank["rank"]))
    everyone = table(headers, map(row, ranks[:_MOST_AT_ALL]), f"{label}, all ranks", numbers)
    every = f"All {len(ranks)} ranks" if of <= len(ranks) else f"{len(ranks)} ranks of {of}"
    return joined(
        [
            tag("p", f"The {_MOST_SHOWN} ranks that stand out of {max(of, len(ranks))}:", class_="quiet"),
            table(headers, map(row, shown), label, numbers),
            tag("details", tag("summary", every), everyone),
        ]
    )


def folded_nodes(
    headers: Sequence[str],
    nodes: Sequence[Given],
    rows: Callable[[Given], Iterable[Sequence[object]]],
    weight: Callable[[Given], float],
    label: str,
    numbers: Sequence[int] = (),
) -> Html:
    """The same of nodes, which may take several rows each."""

    def drawn(some: Sequence[Given], name: str) -> Html:
        return table(headers, [row for node in some for row in rows(node)], name, numbers)

    if len(nodes) <= _MOST_SHOWN:
        return drawn(nodes, label)
    heaviest = {id(node) for node in sorted(nodes, key=weight, reverse=True)[:_MOST_NODES]}
    shown = [node for node in nodes if id(node) in heaviest]
    everyone = drawn(nodes[:_MOST_AT_ALL], f"{label}, all nodes")
    return joined(
        [
            tag("p", f"The {_MOST_NODES} nodes that stand out of {len(nodes)}:", class_="quiet"),
            drawn(shown, label),
            tag("details", tag("summary", f"All {len(nodes)} nodes"), everyone),
        ]
    )
