"""What reductions cost on this job's links: a latency and a bandwidth, and how reductions follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddpcheck.analysis.overlap.bucket_layout import Bucket


@dataclass(frozen=True)
class Link:
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
