"""Values of several ranks, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.table import Table

from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.terminal.console import Ink

# More columns than this are no longer "side by side"; equal ranks then share one.
_MOST_RANKS = 8
# What a finding's tables stand in from the edge, and the width of "(1024 more ranks)".
_INDENT = 6
_REMARK = 18
# Digits that tell any two values of a type apart; anything else is written out in full.
_DIGITS = {"float32": 9, "float16": 5, "bfloat16": 4}


Rows = Sequence[tuple[str, Mapping[str, Any]]]


def side_by_side(ink: Ink, corner: str, rows: Rows, dtype: str = "") -> Table:
    """One row per place, one column per rank, or per group of ranks with equal values."""
    rows = [(place, {str(rank): value for rank, value in by_rank.items()}) for place, by_rank in rows]
    ranks = sorted({rank for _, by_rank in rows for rank in by_rank}, key=rank_order)
    groups = [[rank] for rank in ranks]
    if _fitting(ink, corner, rows, groups, dtype) < len(groups):
        groups = equal_ranks(ranks, rows)
    room = _fitting(ink, corner, rows, groups, dtype)
    headers = [corner, *(column_header(group) for group in groups[:room])]
    left_out = sum(map(len, groups[room:]))
    headers += [f"({left_out} more ranks)"] if left_out else []
    return ink.columns(headers, ([place, *_cells(groups[:room], by_rank, dtype)] for place, by_rank in rows))


def _fitting(ink: Ink, corner: str, rows: Rows, groups: list[list[str]], dtype: str) -> int:
    """How many of the columns the console has room for, two at least."""
    left = ink.console.width - _INDENT - max(len(corner), *(len(place) for place, _ in rows))
    widths = [
        max(len(column_header(group)), *(len(_cells([group], by_rank, dtype)[0]) for _, by_rank in rows)) + 2
        for group in groups[:_MOST_RANKS]
    ]
    if sum(widths) > left or len(groups) > _MOST_RANKS:
        left -= _REMARK
    return max(2, sum(total <= left for total in accumulate(widths)))


def spoken_by_rank(by_rank: Mapping[str, Any]) -> str:
    """`ranks 0-2: 120; rank 3: 119`, for values that need no table."""
    groups: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(spoken(value), []).append(int(rank))
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    parts = [f"{name_ranks(ranks)}: {value}" for value, ranks in ordered[:_MOST_RANKS]]
    left_out = sum(len(ranks) for _, ranks in ordered[_MOST_RANKS:])
    return "; ".join(parts) + (f"; {left_out} more ranks" if left_out else "")


def is_by_rank(value: object) -> bool:
    """Whether `value` maps ranks to something."""
    return isinstance(value, Mapping) and bool(value) and all(str(key).isdecimal() for key in value)


def spoken(value: Any, dtype: str = "") -> str:
    """One value the way people write it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        digits = _DIGITS.get(dtype.removeprefix("torch."))
        return f"{value:.{digits}g}" if digits else repr(value)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) and item for item in value):
        return ", ".join(value)
    return json.dumps(value, default=str, ensure_ascii=False)


def equal_ranks(ranks: list[str], rows: Rows) -> list[list[str]]:
    """Ranks that have the same in every row, together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        column = tuple(spoken(by_rank[rank]) if rank in by_rank else "" for _, by_rank in rows)
        groups.setdefault(column, []).append(rank)
    return list(groups.values())


def column_header(group: list[str]) -> str:
    if all(rank.isdecimal() for rank in group):
        return name_ranks(map(int, group)) if len(group) < 3 else f"ranks {rank_ranges(map(int, group))}"
    return ", ".join(group)


def _cells(groups: list[list[str]], by_rank: Mapping[str, Any], dtype: str) -> list[str]:
    return [spoken(by_rank[group[0]], dtype) if group[0] in by_rank else "-" for group in groups]


def rank_order(rank: str) -> tuple[int, str]:
    return (int(rank), "") if rank.isdecimal() else (1 << 62, rank)
