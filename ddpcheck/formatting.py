"""Ranks written the short way: "ranks 0-2 and 7" instead of a list of thousands."""

from __future__ import annotations

from collections.abc import Iterable

# Alternating ranks make no ranges, and a line of hundreds of numbers helps nobody.
_MOST_RANGES = 12


def rank_ranges(ranks: Iterable[int]) -> str:
    """`0-2, 7`; empty for no rank at all."""
    return ", ".join(_parts(ranks))


def name_ranks(ranks: Iterable[int]) -> str:
    """How people would say it: "rank 2", "ranks 0-3 and 7", "no rank"."""
    distinct = set(ranks)
    if not distinct:
        return "no rank"
    *first, last = _parts(distinct)
    told = f"{', '.join(first)} and {last}" if first else last
    return f"{'rank' if len(distinct) == 1 else 'ranks'} {told}"


def _parts(ranks: Iterable[int]) -> list[str]:
    spans = _spans(sorted(set(ranks)))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:_MOST_RANGES]]
    left_out = sum(last - first + 1 for first, last in spans[_MOST_RANGES:])
    return [*shown, f"{left_out} more"] if left_out else shown


def _spans(ordered: list[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return spans
