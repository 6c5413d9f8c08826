"""Models of the link that reductions use, fitted to the measured reductions; DDP's bucket rule."""

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
    """One gradient: bytes, and when it was ready on the slowest rank, relative to the first one."""

    bytes: int
    dtype: str
    ready_ns: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, after the last of them is ready."""

    bytes: int
    ready_ns: int


def laid_out(gradients: Iterable[Gradient], limits: Sequence[int]) -> list[Bucket]:
    """DDP's rule: a bucket of a type takes gradients until it has reached its limit, so it may exceed it.

    The n-th bucket of a type has the n-th limit; the last limit holds for all that follow.
    """
    open_buckets: dict[str, list[Gradient]] = {}
    closed: dict[str, int] = {}
    buckets: list[Bucket] = []
    for gradient in gradients:
        held = open_buckets.setdefault(gradient.dtype, [])
        held.append(gradient)
        number = closed.get(gradient.dtype, 0)
        if sum(each.bytes for each in held) >= limits[min(number, len(limits) - 1)]:
            buckets.append(_bucket(held))
            open_buckets[gradient.dtype] = []
            closed[gradient.dtype] = number + 1
    return buckets + [_bucket(held) for held in open_buckets.values() if held]


def _bucket(held: Sequence[Gradient]) -> Bucket:
    return Bucket(sum(each.bytes for each in held), max(each.ready_ns for each in held))


@dataclass(frozen=True)
class LinkModel:
    """Reductions one after the other, as on a device stream: latency, then transfer."""

    # Latency of a single reduction, and its time per byte.
    latency_ns: float
    ns_per_byte: float
    # Whether a reduction may transfer during the latency of another one.
    hides_latency: ClassVar[bool] = False

    def reduce(self, buckets: Sequence[Bucket]) -> list[tuple[float, float]]:
        """Start and end of each reduction. They start in order, when ready and when the link permits."""
        free = 0.0
        times = []
        for bucket in buckets:
            start = max(free, bucket.ready_ns)
            free = start + self.latency_ns + bucket.bytes * self.ns_per_byte
            times.append((start, free))
        return times

    def finish(self, buckets: Sequence[Bucket]) -> float:
        """The end of the last reduction."""
        return max(end for _, end in self.reduce(buckets))


# gloo: number of threads, messages in flight per reduction, and maximum message size.
_AT_A_TIME = 2
_IN_FLIGHT = 2
_LARGEST_MESSAGE = 1 << 20
# Larger rings are simulated as this size: smaller messages share the link in the same way.
_LARGEST_RING = 4


@dataclass(frozen=True)
class GlooLink(LinkModel):
    """Two reductions run at a time. Each passes the ring twice, with two messages in flight.

    Both share one connection, which sends messages in order. A small reduction therefore waits for the large messages
    of another one, and one reduction uses the bandwidth while the other waits.
    """

    ranks: int = 2
    hides_latency: ClassVar[bool] = True

    def reduce(self, buckets: Sequence[Bucket]) -> list[tuple[float, float]]:
        """Start and end of each reduction, simulated for one rank: all ranks behave alike."""
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
        # In gloo every rank has a part of the bucket, of at least two messages.
        messages = ceil(max(_IN_FLIGHT, bucket.bytes / _LARGEST_MESSAGE / ring))
        rounds = [(ring - 1) * messages] * 2
        return _Reduction(number, now, bucket.bytes * self.ns_per_byte / sum(rounds), rounds)


class _Reduction:
    """A running reduction: messages of this round still to be sent, and still to arrive."""

    def __init__(self, number: int, start: float, message_ns: float, rounds: list[int]) -> None:
        self.number, self.start, self.message_ns = number, start, message_ns
        self._rounds = rounds
        self._unsent = self._in_flight = 0

    def go_on(self, wire: _Wire, now: float) -> bool:
        """At the start, or when a message arrived: send the next messages. True when finished."""
        self._in_flight = max(0, self._in_flight - 1)
        if not self._unsent and not self._in_flight and self._rounds:
            # The second round (allgather) waits for the end of the first (reduce-scatter).
            self._unsent = self._rounds.pop()
        while self._unsent and self._in_flight < _IN_FLIGHT:
            wire.send(self, now)
            self._unsent -= 1
            self._in_flight += 1
        return not self._in_flight


class _Wire:
    """Transfers one message at a time, in order; each arrives one latency after it was sent."""

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


# Minimum size ratio to separate latency from bandwidth.
_LEAST_SPREAD = 1.5
# Latencies to try, relative to the shortest reduction, which takes at least its latency; denser for small values.
_SHARES = tuple((step / 20) ** 2 for step in range(21))
# Factors by which the fit changes a parameter, from coarse to fine.
_FIRST_FACTOR, _LAST_FACTOR = 1.4, 1.005
# Minimum relative improvement.
_LEAST_BETTER = 1e-4
# Minimum relative uncertainty of a reduction.
_LEAST_UNCERTAINTY = 0.05
# Square of two standard deviations: exceeded by one fit in twenty.
_BY_CHANCE = 4.0
# Above this share of the best latency, the lowest latency with an equivalent fit is not preferred.
_SAME_LATENCY = 0.5

AnyLink = TypeVar("AnyLink", bound=LinkModel)


@dataclass(frozen=True)
class ObservedReduction:
    """One measured reduction of a bucket: bytes, when the last rank was ready, and duration."""

    bucket: Bucket
    took_ns: float
    # Uncertainty: backwards differ.
    unsure_ns: float = 0.0


@dataclass(frozen=True)
class LinkFit(Generic[AnyLink]):
    """A link, and its relative error on the measured reductions."""

    link: AnyLink
    error: float


def fitted(kind: AnyLink, observed: Sequence[ObservedReduction]) -> LinkFit[AnyLink] | None:
    """A link of this kind, whose parameters are ignored; None if the measurements are not sufficient."""
    sizes = [each.bucket.bytes for each in observed]
    if len(observed) < 2 or min(sizes) <= 0 or max(sizes) < _LEAST_SPREAD * min(sizes):
        return None
    if any(each.took_ns <= 0 for each in observed):
        return None
    tried = _best_per_latency(kind, observed)
    best = _nearby(min(tried, key=lambda link: _weighted_error(link, observed)), observed)
    if kind.hides_latency:
        least = next((link for link in tried if _explains_as_well(link, best, observed)), best)
        best = least if least.latency_ns < _SAME_LATENCY * best.latency_ns else best
    error = sum(map(abs, _errors(best, observed))) / sum(each.took_ns for each in observed)
    return LinkFit(best, error)


def _best_per_latency(kind: AnyLink, observed: Sequence[ObservedReduction]) -> list[AnyLink]:
    """The best bandwidth for each latency, the lowest first: local optimization of both may end in a local minimum.

    If reductions overlap, prefer the lowest latency with an equivalent fit. One reduction transfers while the other
    waits, so a high latency on a fast link and no latency on a slower link fit equally well. Too high a latency
    would make simulated smaller buckets too slow.
    """
    shortest = min(each.took_ns for each in observed)
    link = replace(
        kind, ns_per_byte=sum(each.took_ns for each in observed) / sum(each.bucket.bytes for each in observed)
    )
    tried = []
    for share in _SHARES:
        link = _nearby(replace(link, latency_ns=share * shortest), observed, bandwidth_only=True)
        tried.append(link)
    return tried


def _nearby(link: AnyLink, observed: Sequence[ObservedReduction], bandwidth_only: bool = False) -> AnyLink:
    """Local optimization from this link."""
    error, factor = _weighted_error(link, observed), _FIRST_FACTOR
    while factor > _LAST_FACTOR:
        around = (
            (_weighted_error(other, observed), other) for other in _around(link, factor, bandwidth_only)
        )
        best_error, best = min(around, key=lambda each: each[0])
        if best_error < error * (1 - _LEAST_BETTER):
            link, error = best, best_error
        else:
            factor = sqrt(factor)
    return link


def _around(link: AnyLink, factor: float, bandwidth_only: bool) -> list[AnyLink]:
    less = 1 / factor
    # Also change both at once: latency and bandwidth are correlated.
    changes = ((1, factor), (1, less), (factor, 1), (less, 1), (factor, less), (less, factor))
    return [
        replace(link, latency_ns=link.latency_ns * by_latency, ns_per_byte=link.ns_per_byte * by_size)
        for by_latency, by_size in changes[: 2 if bandwidth_only else None]
    ]


def _weighted_error(link: LinkModel, observed: Sequence[ObservedReduction]) -> float:
    """Sum of squared errors, each divided by the measured time: long reductions have larger uncertainties.

    Relative errors would give too much weight to short reductions, which buffers of the link speed up.
    """
    return sum(error**2 / each.took_ns for error, each in zip(_errors(link, observed), observed, strict=True))


def _explains_as_well(other: LinkModel, best: LinkModel, observed: Sequence[ObservedReduction]) -> bool:
    """True if the fit is not significantly worse than the best."""
    least = _chi_squared(best, observed)
    # If even the best fit has larger errors than expected, scale the uncertainty.
    return _chi_squared(other, observed) <= least + _BY_CHANCE * max(1.0, least / len(observed))


def _chi_squared(link: LinkModel, observed: Sequence[ObservedReduction]) -> float:
    """Sum of squared errors, each relative to its uncertainty."""
    errors = zip(_errors(link, observed), observed, strict=True)
    return sum(
        (error / max(each.unsure_ns, _LEAST_UNCERTAINTY * each.took_ns)) ** 2 for error, each in errors
    )


def _errors(link: LinkModel, observed: Sequence[ObservedReduction]) -> list[float]:
    times = link.reduce([each.bucket for each in observed])
    return [end - start - each.took_ns for (start, end), each in zip(times, observed, strict=True)]
