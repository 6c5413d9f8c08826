"""Which rank sketches which of the reduced gradients: they are the same on all, so the work is dealt out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from ddpcheck.records.kinds.modules import ModuleRecord


@lru_cache(maxsize=64)
def deal(sizes: tuple[int, ...], hands: int) -> tuple[tuple[int, ...], ...]:
    """Places by hand, the largest first: everybody gets about as much, since the slowest rank holds up the others.

    Weights and biases take turns, so that dealing by place alone would give all the work to one of two ranks.
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    by_size = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    for turn, place in enumerate(by_size):
        lap, seat = divmod(turn, hands)
        # Back and forth: who took the largest of one lap takes the smallest of the next.
        dealt[hands - 1 - seat if lap % 2 else seat].append(place)
    return tuple(tuple(sorted(hand)) for hand in dealt)


def shares(module: ModuleRecord) -> dict[int, tuple[int, ...]]:
    """By rank."""
    sizes = tuple(math.prod(row[2]) for row in module.parameters)
    return dict(zip(module.group, deal(sizes, len(module.group)), strict=True))


def share_of(sizes: Sequence[int], part: int, of: int) -> tuple[int, ...]:
    return deal(tuple(sizes), of)[part]
