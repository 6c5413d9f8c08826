"""How gloo's reductions share a link: message by message, on one connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import ceil, inf
from typing import ClassVar

from ddpcheck.analysis.overlap.bucket_layout import Bucket
from ddpcheck.analysis.overlap.link import Link

# What gloo does: threads that reduce, messages that a reduction has under way, and how large one may be.
_AT_A_TIME = 2
_UNDER_WAY = 2
_LARGEST_MESSAGE = 1 << 20
# A larger ring has more and smaller messages, which share the link in the same way: not worth the time.
_LARGEST_RING = 4


@dataclass(frozen=True)
class GlooLink(Link):
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
