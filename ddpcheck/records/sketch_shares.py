"""Distributes the reduced gradients over ranks for sketching: they are equal on all ranks, so each sketches a share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from ddpcheck.records.kinds.modules import ModuleRecord


@lru_cache(maxsize=64)
def distribute(sizes: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """The parameter indices of each rank, with about equal total sizes: the slowest rank delays the others.

    Sizes must be considered: weights and biases alternate, so that every second index would give one of two ranks all
    the work.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for turn, index in enumerate(by_size):
        round_number, position = divmod(turn, ranks)
        # Alternating direction: the rank with the largest of one round gets the smallest of the next.
        shares[ranks - 1 - position if round_number % 2 else position].append(index)
    return tuple(tuple(sorted(share)) for share in shares)


def shares(module: ModuleRecord) -> dict[int, tuple[int, ...]]:
    """The parameter indices of each rank of the group."""
    sizes = tuple(math.prod(row[2]) for row in module.parameters)
    return dict(zip(module.group, distribute(sizes, len(module.group)), strict=True))


def share_of(sizes: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The parameter indices of one rank. `rank`: its position in the group."""
    return distribute(tuple(sizes), ranks)[rank]
