"""The result of analysing traces. Times are nanoseconds since `origin_ns`."""

from __future__ import annotations

from dataclasses import dataclass

# Version of the JSON document.
# 1, 2026: the first.
TRACE_SCHEMA = 1


@dataclass(frozen=True)
class Shares:
    """How a time span was used, from exact unions of intervals."""

    span_ns: int
    comm_ns: int
    compute_ns: int
    # Communication while compute ran, and while none did.
    overlap_ns: int
    exposed_ns: int
    # Copies and fills of memory while nothing else ran.
    copy_ns: int
    idle_ns: int

    @property
    def overlap_pct(self) -> float:
        return round(100 * self.overlap_ns / self.comm_ns, 3) if self.comm_ns else 0.0

    @property
    def compute_alone_ns(self) -> int:
        return self.compute_ns - self.overlap_ns


@dataclass(frozen=True)
class StepShares:
    """One step of one rank; without step annotations the whole file is one step without a number."""

    step: int | None
    start_ns: int
    shares: Shares


@dataclass(frozen=True)
class RankClockOffset:
    """Clock offset of a rank, from the ends of common collectives."""

    offset_ns: int
    residual_ns: int
    # Number of collectives used.
    samples: int
    # Whether the offset was significant and subtracted from all times of this rank.
    corrected: bool


@dataclass(frozen=True)
class RankResult:
    """One rank."""

    rank: int
    file: str
    source: str
    shares: Shares
    steps: tuple[StepShares, ...]
    collectives: int
    # Over matched collectives; None if there are none.
    wait_ns: int | None
    last_arrivals: int | None
    clock: RankClockOffset | None


@dataclass(frozen=True)
class Part:
    """One rank's part in a collective."""

    rank: int
    start_ns: int
    end_ns: int
    ready_ns: int | None
    hidden_ns: int
    exposed_ns: int
    wait_ns: int | None
    lane: str

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class CollectiveResult:
    """One collective over all ranks that show it."""

    kind: str
    name: str
    group: str | None
    group_size: int | None
    step: int | None
    bucket: int | None
    elements: int | None
    dtype: str | None
    bytes: int | None
    # The shortest duration on any rank, which does not include waiting. None for a single rank.
    transfer_ns: int | None
    skew_ns: int | None
    # The rank that arrived last; None for a single rank or a tie.
    last_rank: int | None
    # GB/s (1e9 bytes) over the transfer; for a single rank over its duration, including waiting.
    algbw_gbps: float | None
    busbw_gbps: float | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class OperationSummary:
    """All collectives of one kind, group and size; times and rates are medians."""

    kind: str
    group: str | None
    bytes: int | None
    # Whether they reduce DDP's buckets.
    of_ddp: bool
    count: int
    duration_ns: int
    transfer_ns: int | None
    skew_ns: int | None
    algbw_gbps: float | None
    busbw_gbps: float | None


@dataclass(frozen=True)
class BucketSummary:
    """One of DDP's buckets over all steps and ranks; times and rates are medians."""

    bucket: int
    bytes: int | None
    count: int
    # From the call on the CPU to the start of the reduction.
    queued_ns: int | None
    duration_ns: int
    transfer_ns: int | None
    hidden_pct: float
    algbw_gbps: float | None
    busbw_gbps: float | None


@dataclass(frozen=True)
class Headline:
    """The main figures; times are means over ranks."""

    comm_ns: int
    overlap_pct: float
    exposed_ns: int
    span_ns: int
    wait_ns: int | None
    transfer_ns: int | None
    # None if several ranks were last equally often.
    most_often_last: int | None
    times_last: int
    matched: int


@dataclass(frozen=True)
class TraceResult:
    """All results of a set of traces."""

    headline: Headline
    ranks: tuple[RankResult, ...]
    collectives: tuple[CollectiveResult, ...]
    operations: tuple[OperationSummary, ...]
    buckets: tuple[BucketSummary, ...]
    # Sum over matched collectives; None if none was matched.
    transfer_ns: int | None
    matched: int
    # Collectives that could not be matched, summed over ranks; 0 with one rank.
    unmatched: int
    world_size: int | None
    origin_ns: int
