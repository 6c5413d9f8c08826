"""Names simple ratios: gradients that are four times too large on four ranks tell what was forgotten."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpcheck.records.sketch_codec import Packed


class Ratio(NamedTuple):
    """B over A, and what that number is, where it is a simple one."""

    value: float
    meaning: str

    def __str__(self) -> str:
        number = f"{self.value:.1f}" if float(self.value).is_integer() else f"{self.value:.6g}"
        return number + (f" (= {self.meaning})" if self.meaning else "")


def common_ratio(pairs: Sequence[tuple[Packed, Packed]], slack: float) -> float | None:
    """The one factor by which all of B's gradients are A's, within `slack`; None where there is none."""
    known = [(a, b) for a, b in pairs if a.known and b.known]
    squares = math.fsum(a.value**2 for a, _ in known)
    if not squares or len(known) < len(pairs):
        return None
    ratio = math.fsum(a.value * b.value for a, b in known) / squares
    if not ratio:
        return None
    for a, b in known:
        allowed = slack * max(abs(ratio) * a.norm, b.norm) + abs(ratio) * a.error + b.error
        fits = b.norm_low <= abs(ratio) * a.norm * (1 + slack) and abs(ratio) * a.norm_low <= b.norm * (
            1 + slack
        )
        if abs(b.value - ratio * a.value) > allowed or not fits:
            return None
    return ratio


def named(ratio: float, quantities: Mapping[str, float], slack: float) -> Ratio:
    """`ratio` with the quantity of the job that it equals, or one over it; else rounded to a small number."""
    size = abs(ratio)
    for name, quantity in quantities.items():
        if quantity <= 1:
            continue
        if _equal(size, quantity, slack):
            return Ratio(math.copysign(quantity, ratio), name)
        if _equal(size, 1 / quantity, slack):
            return Ratio(math.copysign(1 / quantity, ratio), f"1 / {name}")
    for whole in range(1 if ratio < 0 else 2, 65):
        if _equal(size, whole, slack):
            return Ratio(math.copysign(whole, ratio), "")
        if _equal(size, 1 / whole, slack):
            return Ratio(math.copysign(1 / whole, ratio), "")
    return Ratio(ratio, "")


def ratio_of(a: object, b: object) -> float | None:
    """Of two numbers, where they are numbers that have one."""
    if isinstance(a, bool) or isinstance(b, bool):
        return None
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)) or not a or not b:
        return None
    return b / a if math.isfinite(a) and math.isfinite(b) else None


def _equal(a: float, b: float, slack: float) -> bool:
    return abs(a - b) <= slack * b
