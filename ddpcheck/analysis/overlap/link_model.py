"""Finds the link on which reductions take as long as those that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Generic, TypeVar

from ddpcheck.analysis.overlap.bucket_layout import Bucket
from ddpcheck.analysis.overlap.link import Link

# Reductions of nearly one size tell no latency from bandwidth.
_LEAST_SPREAD = 1.5
# Latencies that are tried, as shares of the shortest reduction, which took at least its latency: close to each other
# where they are small.
_SHARES = tuple((step / 20) ** 2 for step in range(21))
# From there the fit changes a figure by a factor, and by a smaller one once that brings nothing more.
_FIRST_FACTOR, _LAST_FACTOR = 1.4, 1.005
# What brings less than this share is nothing.
_LEAST_BETTER = 1e-4
# Reductions are never known better than this, as a share of what they took.
_LEAST_UNSURE = 0.05
# A square of two deviations: one fit in twenty is off by that much or more.
_BY_CHANCE = 4.0
# From this share of the best latency on, the least that explains as well says the same.
_TOLD = 0.5

AnyLink = TypeVar("AnyLink", bound=Link)


@dataclass(frozen=True)
class Seen:
    """One backward's reduction of a bucket: what it carried, when the last rank was ready, how long it took then."""

    bucket: Bucket
    took_ns: float
    # By how much that may be off: backwards differ.
    unsure_ns: float = 0.0


@dataclass(frozen=True)
class Fit(Generic[AnyLink]):
    """A link, and how much of the time that reductions took it misses."""

    link: AnyLink
    error: float


def fitted(kind: AnyLink, seen: Sequence[Seen]) -> Fit[AnyLink] | None:
    """A link of this kind, whose figures do not matter; None where what was seen does not tell."""
    sizes = [each.bucket.bytes for each in seen]
    if len(seen) < 2 or min(sizes) <= 0 or max(sizes) < _LEAST_SPREAD * min(sizes):
        return None
    if any(each.took_ns <= 0 for each in seen):
        return None
    tried = _of_each_latency(kind, seen)
    best = _nearby(min(tried, key=lambda link: _missed(link, seen)), seen)
    if kind.hides_latency:
        least = next((link for link in tried if _explains_as_well(link, best, seen)), best)
        best = least if least.latency_ns < _TOLD * best.latency_ns else best
    error = sum(map(abs, _misses(best, seen))) / sum(each.took_ns for each in seen)
    return Fit(best, error)


def _of_each_latency(kind: AnyLink, seen: Sequence[Seen]) -> list[AnyLink]:
    """The best bandwidth for each: small steps alone may end where neither is right. The least latency comes first.

    It is also the one to take where reductions overlap and others explain them no better. One of them moves bytes while
    the other waits, so a large latency on a fast link and none on a slower one look the same; other buckets would then
    have to pay for a latency that nothing speaks for.
    """
    shortest = min(each.took_ns for each in seen)
    link = replace(
        kind, ns_per_byte=sum(each.took_ns for each in seen) / sum(each.bucket.bytes for each in seen)
    )
    tried = []
    for share in _SHARES:
        link = _nearby(replace(link, latency_ns=share * shortest), seen, bandwidth_only=True)
        tried.append(link)
    return tried


def _nearby(link: AnyLink, seen: Sequence[Seen], bandwidth_only: bool = False) -> AnyLink:
    """The best that small steps lead to from this one."""
    missed, factor = _missed(link, seen), _FIRST_FACTOR
    while factor > _LAST_FACTOR:
        around = ((_missed(other, seen), other) for other in _around(link, factor, bandwidth_only))
        best_missed, best = min(around, key=lambda each: each[0])
        if best_missed < missed * (1 - _LEAST_BETTER):
            link, missed = best, best_missed
        else:
            factor = sqrt(factor)
    return link


def _around(link: AnyLink, factor: float, bandwidth_only: bool) -> list[AnyLink]:
    less = 1 / factor
    # Both at once too: more of the one often means less of the other.
    changes = ((1, factor), (1, less), (factor, 1), (less, 1), (factor, less), (less, factor))
    return [
        replace(link, latency_ns=link.latency_ns * by_latency, ns_per_byte=link.ns_per_byte * by_size)
        for by_latency, by_size in changes[: 2 if bandwidth_only else None]
    ]


def _missed(link: Link, seen: Sequence[Seen]) -> float:
    """Squares of the misses, each over its own time: a long reduction is uncertain by more than a short one.

    Shares alone would let short reductions decide, which a link's buffers speed up, and a forecast is made of time.
    """
    return sum(miss**2 / each.took_ns for miss, each in zip(_misses(link, seen), seen, strict=True))


def _explains_as_well(other: Link, best: Link, seen: Sequence[Seen]) -> bool:
    """Whether it is worse by no more than what chance does to a figure now and then: all reductions count."""
    least = _against_chance(best, seen)
    # Where even the best misses by more than chance, the link is not quite like the model, and tells less.
    return _against_chance(other, seen) <= least + _BY_CHANCE * max(1.0, least / len(seen))


def _against_chance(link: Link, seen: Sequence[Seen]) -> float:
    """The sum of squares of misses, each over what its time is unsure by."""
    misses = zip(_misses(link, seen), seen, strict=True)
    return sum((miss / max(each.unsure_ns, _LEAST_UNSURE * each.took_ns)) ** 2 for miss, each in misses)


def _misses(link: Link, seen: Sequence[Seen]) -> list[float]:
    times = link.reduce([each.bucket for each in seen])
    return [end - start - each.took_ns for (start, end), each in zip(times, seen, strict=True)]
