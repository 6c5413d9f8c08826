"""Figures over the steps of a job in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Scale = tuple[float, float]

# Not the whole block: rows below each other would run into one.
_BARS = "▁▂▃▄▅▆▇"
_ASCII_BARS = "_.-=+*#"
SPARK = "cyan"
_GAP = " "
# Spreads, as shares of the largest value, from which on there is something to see, and to see from zero.
_FLAT = 0.02
_WIDE = 0.25


def spark(
    values: Sequence[float | None], width: int, ascii_only: bool = False, scale: Scale | None = None
) -> str:
    """At most `width` characters, each the largest of the values it stands for; a gap where nothing is known."""
    drawn = _gathered(values, width)
    known = [value for value in drawn if value is not None]
    if not known:
        return ""
    bars = _ASCII_BARS if ascii_only else _BARS
    low, high = scale or scale_of(known)
    return "".join(_GAP if value is None else bars[_level(value, low, high, len(bars))] for value in drawn)


def scale_of(known: Sequence[float]) -> Scale:
    """What the lowest and the highest bar stand for; equal ends: there is nothing worth seeing.

    The scale begins at zero, so that a bar twice as high is twice as much. Where values are so close together that
    nothing would show, it begins just below the least of them; where they are closer still, lines are flat.
    """
    low, high = min(known), max(known)
    spread = high - low
    if spread >= _WIDE * high and low >= 0:
        return 0.0, high
    return (low - spread / 4, high) if spread > _FLAT * abs(high) else (high, high)


def _gathered(values: Sequence[float | None], width: int) -> list[float | None]:
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    if len(finite) <= width:
        return finite
    ends = [len(finite) * place // width for place in range(width + 1)]
    return [
        max((value for value in finite[first:end] if value is not None), default=None)
        for first, end in pairwise(ends)
    ]


def _level(value: float, low: float, high: float, levels: int) -> int:
    if high <= low:
        return levels // 2 if value else 0
    return min(levels - 1, int(levels * (value - low) / (high - low)))
