"""Ranks written the short way: "ranks 0-2, 7" instead of a list of thousands."""

from __future__ import annotations

from collections.abc import Iterable

# Alternating ranks make no ranges, and a line of hundreds of numbers helps nobody.
_MOST_RANGES = 12


def rank_ranges(ranks: Iterable[int]) -> str:
    """`0-2, 7`; empty for no rank at all."""
    spans = _spans(sorted(set(ranks)))
    shown = ", ".join(_span(first, last) for first, last in spans[:_MOST_RANGES])
    left_out = sum(last - first + 1 for first, last in spans[_MOST_RANGES:])
    return f"{shown} and {left_out} more" if left_out else shown


def ranks_phrase(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0-2, 7`, or `no rank`."""
    distinct = set(ranks)
    if not distinct:
        return "no rank"
    return f"{'rank' if len(distinct) == 1 else 'ranks'} {rank_ranges(distinct)}"


def _spans(ordered: list[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return spans


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
