"""Tells from a few values on both sides what was done to gradients: scaled, clamped, or set to zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Values of one tensor that must tell the same; fewer may do so by chance.
LEAST = 3
# Scaling rounds each value once: far less than this, in every format but fp8.
SAME_FACTOR = 0.01


def how_changed(elements: Mapping[str, Any], odd: int, usual: int) -> str:
    """What was done on rank `odd` that was not done on rank `usual`, in words; empty where it does not show."""
    pairs = [
        (float(said[str(odd)]), float(said[str(usual)]))
        for said in (row["by_rank"] for row in elements.get("values", ()))
        if isinstance(said.get(str(odd)), float) and isinstance(said.get(str(usual)), float)
    ]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if len(pairs) < LEAST:
        return ""
    return _zeroed(pairs, odd) or _clamped(pairs, odd) or _scaled(pairs, odd, usual)


def _zeroed(pairs: Sequence[tuple[float, float]], odd: int) -> str:
    return f"set to zero on rank {odd}" if all(ours == 0 for ours, _ in pairs) else ""


def _clamped(pairs: Sequence[tuple[float, float]], odd: int) -> str:
    """All values that differ stand at one limit, on their own side of zero, and were beyond it."""
    limit = abs(pairs[0][0])
    at_limit = all(abs(ours) == limit and ours * theirs > 0 and abs(theirs) > limit for ours, theirs in pairs)
    return f"clamped at {limit:.3g} on rank {odd}" if at_limit else ""


def _scaled(pairs: Sequence[tuple[float, float]], odd: int, usual: int) -> str:
    factors = sorted(ours / theirs for ours, theirs in pairs if theirs)
    if len(factors) < LEAST or not factors[0] * factors[-1] > 0:
        return ""
    if abs(factors[-1] - factors[0]) > SAME_FACTOR * abs(factors[0]):
        return ""
    factor = factors[len(factors) // 2]
    return f"scaled by different factors: rank {odd}'s are {factor:.3g} times those of rank {usual}"
