"""How DDP cuts gradients into buckets, once it knows the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gradient:
    """One gradient: what it weighs, and how long after the first one it was ready on the slowest rank."""

    bytes: int
    dtype: str
    ready_ns: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, which cannot begin before the last of them is there."""

    bytes: int
    ready_ns: int


def laid_out(gradients: Iterable[Gradient], limits: Sequence[int]) -> list[Bucket]:
    """DDP's rule: a bucket of a type takes gradients until it has reached its limit, so it may exceed it.

    The n-th bucket of a type has the n-th limit; the last limit holds for all that follow.
    """
    open_ones: dict[str, list[Gradient]] = {}
    closed: dict[str, int] = {}
    buckets: list[Bucket] = []
    for gradient in gradients:
        held = open_ones.setdefault(gradient.dtype, [])
        held.append(gradient)
        number = closed.get(gradient.dtype, 0)
        if sum(each.bytes for each in held) >= limits[min(number, len(limits) - 1)]:
            buckets.append(_bucket(held))
            open_ones[gradient.dtype] = []
            closed[gradient.dtype] = number + 1
    return buckets + [_bucket(held) for held in open_ones.values() if held]


def _bucket(held: Sequence[Gradient]) -> Bucket:
    return Bucket(sum(each.bytes for each in held), max(each.ready_ns for each in held))
