"""Overlap and waiting in the profiled steps, as report.json holds them; times are nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankStepOverlap:
    """One rank in one profiled step."""

    step: int
    comm_ns: int
    compute_ns: int
    overlap_ns: int
    exposed_ns: int
    overlap_pct: float


@dataclass(frozen=True)
class RankOverlap:
    """One rank over all profiled steps."""

    rank: int
    file: str
    span_ns: int
    comm_ns: int
    compute_ns: int
    overlap_ns: int
    exposed_ns: int
    copy_ns: int
    idle_ns: int
    overlap_pct: float
    # Of the exposed time: transfers, and waiting for the last rank; null if ranks could not be compared.
    exposed_transfer_ns: int | None
    exposed_wait_ns: int | None
    # Over all collectives, overlapped or not.
    wait_ns: int | None
    last_arrivals: int | None
    clock_offset_ns: int
    clock_residual_ns: int
    # Time in which its threads were runnable without a CPU.
    held_up_ns: int = 0
    by_step: tuple[RankStepOverlap, ...] = ()
    # Compute intervals relative to the origin, with short gaps closed. Empty for very many ranks.
    computing: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StepOverlap:
    """One step: means over ranks."""

    step: int
    took_ns: int
    exposed_transfer_ns: int
    exposed_wait_ns: int


@dataclass(frozen=True)
class BucketPart:
    """One rank's part in the reduction of a bucket; times are relative to the origin."""

    rank: int
    ready_ns: int | None
    start_ns: int
    end_ns: int
    hidden_ns: int
    exposed_ns: int
    wait_ns: int | None


@dataclass(frozen=True)
class BucketOverlap:
    """One bucket in one step."""

    step: int
    bucket: int
    bytes: int | None
    transfer_ns: int | None
    skew_ns: int | None
    last_rank: int | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    ranks: tuple[BucketPart, ...]


@dataclass(frozen=True)
class BucketLayout:
    """A bucket layout, and the simulated time of a backward with its communication."""

    # Size limits in bytes: of the first bucket and of all others.
    first_bytes: int
    cap_bytes: int
    buckets: int
    backward_ns: int


@dataclass(frozen=True)
class BucketAdvice:
    """Effect of other bucket sizes, simulated with measured times."""

    module: str
    # The current layout: measured, and simulated.
    measured_ns: int
    now: BucketLayout
    best: BucketLayout
    tried: tuple[BucketLayout, ...]
    step_ns: int
    gain_ns: int
    # The fitted link: latency, and throughput of a single reduction.
    latency_ns: int
    bandwidth_gbps: float


# Relative to the exposed transfers: above it they wait for a CPU rather than for a link.
_MOST_HELD_UP = 0.25


@dataclass(frozen=True)
class Overlap:
    """The profiled steps of one attempt."""

    # Origin of the profile: ddpcheck, or the user's own profiler.
    source: str
    first_step: int
    end_step: int
    ranks: tuple[RankOverlap, ...]
    steps: tuple[StepOverlap, ...]
    buckets: tuple[BucketOverlap, ...]
    transfer_ns: int | None
    matched: int
    unmatched: int
    origin_ns: int
    advice: BucketAdvice | None = None
    # One message for each missing trace.
    left_out: tuple[str, ...] = ()

    @property
    def machine_too_busy(self) -> bool:
        """True if ranks lacked CPUs for so long that the times are not representative."""
        exposed = sum(rank.exposed_transfer_ns or 0 for rank in self.ranks)
        return sum(rank.held_up_ns for rank in self.ranks) > _MOST_HELD_UP * exposed
