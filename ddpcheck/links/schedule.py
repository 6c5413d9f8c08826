"""Who measures with whom, and when: every pair once, in rounds of pairs that have nobody in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Unit = TypeVar("Unit")


def rounds(units: Sequence[Unit]) -> list[list[tuple[Unit, Unit]]]:
    """A round-robin by the circle method: N - 1 rounds of N / 2 pairs, N rounds where N is odd.

    Nobody shares a cable with another pair of its round, and time grows with N, not with the number of pairs.
    """
    if len(units) < 2:
        return []
    circle: list[Unit | None] = [*units, *([None] if len(units) % 2 else [])]
    half = len(circle) // 2
    result = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(a, b) for a, b in facing if a is not None and b is not None])
        # The first stays, all others move on by one place.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result
