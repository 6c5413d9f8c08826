"""Finds the link on which reductions take as long as those that were seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import ceil, inf, sqrt
from typing import ClassVar, Generic, TypeVar


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


@dataclass(frozen=True)
class LinkModel:
    """One reduction after the other, as on a device's stream: each takes its latency, then moves its bytes."""

    # Of one reduction alone: what it takes for no bytes at all, and for each byte of the bucket.
    latency_ns: float
    ns_per_byte: float
    # Whether one reduction may move bytes in another one's latency.
    hides_latency: ClassVar[bool] = False

    def reduce(self, buckets: Sequence[Bucket]) -> list[tuple[float, float]]:
        """Start and end of each: they start in order, each when it is ready and those before it leave room."""
        free = 0.0
        times = []
        for bucket in buckets:
            start = max(free, bucket.ready_ns)
            free = start + self.latency_ns + bucket.bytes * self.ns_per_byte
            times.append((start, free))
        return times

    def finish(self, buckets: Sequence[Bucket]) -> float:
        """When the last one is reduced."""
        return max(end for _, end in self.reduce(buckets))


# What gloo does: threads that reduce, messages that a reduction has under way, and how large one may be.
_AT_A_TIME = 2
_UNDER_WAY = 2
_LARGEST_MESSAGE = 1 << 20
# A larger ring has more and smaller messages, which share the link in the same way: not worth the time.
_LARGEST_RING = 4


@dataclass(frozen=True)
class GlooLink(LinkModel):
    """Two reductions run at a time; each goes round the ring twice, in messages of which two are under way.

    The messages of both pass through one connection in the order in which they were handed over. So a small reduction
    waits behind the large messages of another one, and what one leaves unused while it waits the other one gets.
    """

    ranks: int = 2
    hides_latency: ClassVar[bool] = True

    def reduce(self, buckets: Sequence[Bucket]) -> list[tuple[float, float]]:
        """Start and end of each, from one rank's messages to its neighbour: all ranks do the same."""
        wire = _Wire(hop_ns=self.latency_ns / (2 * (self._ring - 1)))
        waiting = deque(enumerate(buckets))
        times = [(0.0, 0.0)] * len(buckets)
        now, running = 0.0, 0
        while waiting or wire.arrivals:
            may_start = waiting and running < _AT_A_TIME
            start = max(now, waiting[0][1].ready_ns) if may_start else inf
            if start <= wire.next_arrival:
                now = start
                number, bucket = waiting.popleft()
                running += 1
                self._reduction(number, bucket, now).go_on(wire, now)
            else:
                now, reduction = wire.arrival()
                if reduction.go_on(wire, now):
                    times[reduction.number] = (reduction.start, now)
                    running -= 1
        return times

    @property
    def _ring(self) -> int:
        return min(self.ranks, _LARGEST_RING)

    def _reduction(self, number: int, bucket: Bucket, now: float) -> _Reduction:
        ring = self._ring
        # By gloo's rule every rank has a part of the bucket, of two messages or more.
        messages = ceil(max(_UNDER_WAY, bucket.bytes / _LARGEST_MESSAGE / ring))
        rounds = [(ring - 1) * messages] * 2
        return _Reduction(number, now, bucket.bytes * self.ns_per_byte / sum(rounds), rounds)


class _Reduction:
    """One under way: its messages of this round that are still to be sent, and those still to arrive."""

    def __init__(self, number: int, start: float, message_ns: float, rounds: list[int]) -> None:
        self.number, self.start, self.message_ns = number, start, message_ns
        self._rounds = rounds
        self._unsent = self._under_way = 0

    def go_on(self, wire: _Wire, now: float) -> bool:
        """It begins, or a message of its has arrived: send what may be sent. True where nothing is left."""
        self._under_way = max(0, self._under_way - 1)
        if not self._unsent and not self._under_way and self._rounds:
            # The second round, in which sums are handed on, waits for the end of the first, in which they are made.
            self._unsent = self._rounds.pop()
        while self._unsent and self._under_way < _UNDER_WAY:
            wire.send(self, now)
            self._unsent -= 1
            self._under_way += 1
        return not self._under_way


class _Wire:
    """Carries one message at a time, in the order in which they come; each arrives a hop after it has left."""

    def __init__(self, hop_ns: float) -> None:
        self.arrivals: list[tuple[float, int, _Reduction]] = []
        self._hop_ns = hop_ns
        self._free = 0.0
        self._order = count()

    @property
    def next_arrival(self) -> float:
        return self.arrivals[0][0] if self.arrivals else inf

    def send(self, reduction: _Reduction, now: float) -> None:
        self._free = max(now, self._free) + reduction.message_ns
        heappush(self.arrivals, (self._free + self._hop_ns, next(self._order), reduction))

    def arrival(self) -> tuple[float, _Reduction]:
        at, _, reduction = heappop(self.arrivals)
        return at, reduction


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

AnyLink = TypeVar("AnyLink", bound=LinkModel)


@dataclass(frozen=True)
class ObservedReduction:
    """One backward's reduction of a bucket: what it carried, when the last rank was ready, how long it took then."""

    bucket: Bucket
    took_ns: float
    # By how much that may be off: backwards differ.
    unsure_ns: float = 0.0


@dataclass(frozen=True)
class LinkFit(Generic[AnyLink]):
    """A link, and how much of the time that reductions took it misses."""

    link: AnyLink
    error: float


def fitted(kind: AnyLink, seen: Sequence[ObservedReduction]) -> LinkFit[AnyLink] | None:
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
    return LinkFit(best, error)


def _of_each_latency(kind: AnyLink, seen: Sequence[ObservedReduction]) -> list[AnyLink]:
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


def _nearby(link: AnyLink, seen: Sequence[ObservedReduction], bandwidth_only: bool = False) -> AnyLink:
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


def _missed(link: LinkModel, seen: Sequence[ObservedReduction]) -> float:
    """Squares of the misses, each over its own time: a long reduction is uncertain by more than a short one.

    Shares alone would let short reductions decide, which a link's buffers speed up, and a forecast is made of time.
    """
    return sum(miss**2 / each.took_ns for miss, each in zip(_misses(link, seen), seen, strict=True))


def _explains_as_well(other: LinkModel, best: LinkModel, seen: Sequence[ObservedReduction]) -> bool:
    """Whether it is worse by no more than what chance does to a figure now and then: all reductions count."""
    least = _against_chance(best, seen)
    # Where even the best misses by more than chance, the link is not quite like the model, and tells less.
    return _against_chance(other, seen) <= least + _BY_CHANCE * max(1.0, least / len(seen))


def _against_chance(link: LinkModel, seen: Sequence[ObservedReduction]) -> float:
    """The sum of squares of misses, each over what its time is unsure by."""
    misses = zip(_misses(link, seen), seen, strict=True)
    return sum((miss / max(each.unsure_ns, _LEAST_UNSURE * each.took_ns)) ** 2 for miss, each in misses)


def _misses(link: LinkModel, seen: Sequence[ObservedReduction]) -> list[float]:
    times = link.reduce([each.bucket for each in seen])
    return [end - start - each.took_ns for (start, end), each in zip(times, seen, strict=True)]
