"""What reductions cost on this job's links: a latency and a bandwidth, fitted to those that were seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

from ddpcheck.analysis.overlap.bucket_layout import Bucket

# Reductions of nearly one size tell no latency from bandwidth.
_LEAST_SPREAD = 1.5
# The fit changes one figure at a time by a factor, and by a smaller one once that brings nothing more.
_FIRST_FACTOR, _LAST_FACTOR = 2.0, 1.005
# Below this a reduction has nothing left to do: what rounding leaves over.
_NOTHING = 1e-3


@dataclass(frozen=True)
class Seen:
    """One backward's reduction of a bucket: what it carried, when the last rank was ready, how long it took then."""

    bucket: Bucket
    took_ns: float


@dataclass
class _Running:
    number: int
    start: float
    latency: float
    transfer: float


@dataclass(frozen=True)
class Link:
    """A reduction waits for its latency, then moves its bytes; `lanes` of them run at a time.

    Those that move bytes at the same moment share the bandwidth. One that still waits leaves it to the other: so
    gloo, which runs two, gets more out of a link than its reductions one by one.
    """

    latency_ns: float
    ns_per_byte: float
    lanes: int = 1
    # By how much the fit misses what was seen, at worst, as a share of it.
    error: float = 0.0

    def reduce(self, buckets: Sequence[Bucket]) -> list[tuple[float, float]]:
        """Start and end of each: they start in order, each when it is ready and a lane is free."""
        now = 0.0
        waiting = deque(enumerate(buckets))
        running: list[_Running] = []
        times = [(0.0, 0.0)] * len(buckets)
        while running or waiting:
            moving = sum(each.latency <= 0 for each in running)
            until_next = (
                max(0.0, waiting[0][1].ready_ns - now) if waiting and len(running) < self.lanes else inf
            )
            step = min([until_next, *(each.latency or each.transfer * moving for each in running)])
            now += step
            for each in running:
                if each.latency > 0:
                    each.latency = each.latency - step if each.latency - step > _NOTHING else 0.0
                else:
                    each.transfer -= step / moving
            if until_next <= step:
                number, bucket = waiting.popleft()
                running.append(_Running(number, now, self.latency_ns, bucket.bytes * self.ns_per_byte))
            for each in running:
                if each.latency <= 0 and each.transfer <= _NOTHING:
                    times[each.number] = (each.start, now)
            running = [each for each in running if each.latency > 0 or each.transfer > _NOTHING]
        return times

    def finish(self, buckets: Sequence[Bucket]) -> float:
        """When the last one is reduced."""
        return max(end for _, end in self.reduce(buckets))


def fitted(seen: Sequence[Seen], lanes: int) -> Link | None:
    """The link on which the same buckets take as long as they took; None where they do not tell."""
    sizes = [each.bucket.bytes for each in seen]
    if len(seen) < 2 or min(sizes) <= 0 or max(sizes) < _LEAST_SPREAD * min(sizes):
        return None
    if any(each.took_ns <= 0 for each in seen):
        return None
    link = Link(
        latency_ns=min(each.took_ns for each in seen) / 4,
        ns_per_byte=sum(each.took_ns for each in seen) / sum(sizes),
        lanes=lanes,
    )
    missed, factor = _missed(link, seen), _FIRST_FACTOR
    while factor > _LAST_FACTOR:
        tried = [(_missed(other, seen), other) for other in _around(link, factor)]
        best_missed, best = min(tried, key=lambda each: each[0][0])
        if best_missed[0] < missed[0]:
            link, missed = best, best_missed
        else:
            factor = sqrt(factor)
    return Link(link.latency_ns, link.ns_per_byte, lanes, missed[1])


def _around(link: Link, factor: float) -> list[Link]:
    less = 1 / factor
    # Both at once too: more of the one often means less of the other.
    changes = ((factor, 1), (less, 1), (1, factor), (1, less), (factor, less), (less, factor))
    return [
        Link(link.latency_ns * by_latency, link.ns_per_byte * by_size, link.lanes)
        for by_latency, by_size in changes
    ]


def _missed(link: Link, seen: Sequence[Seen]) -> tuple[float, float]:
    """Relative misses of how long reductions took: the sum of their squares, and the worst."""
    times = link.reduce([each.bucket for each in seen])
    misses = [
        abs(end - start - each.took_ns) / each.took_ns for (start, end), each in zip(times, seen, strict=True)
    ]
    return sum(miss**2 for miss in misses), max(misses)
