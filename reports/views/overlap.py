"""Overlap: how much communication the profiled steps hid behind compute, by rank and by bucket."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.analysis.overlap.model import BucketOverlap, Overlap, RankOverlap
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import optional_size_text, percent_text, rate_text, time_text
from ddpcheck.reports.views.table import Column, Row, Table, numbers, row
from ddpcheck.traces.model import Shares

_COLUMNS = (
    Column("rank"),
    Column("compute", number=True, detail=True),
    Column("comm", "communication", number=True),
    Column("hidden", "hidden, of communication", number=True),
    Column("exposed", number=True),
    Column("transfer", "exposed transfer", number=True, detail=True),
    Column("wait", "exposed wait", number=True),
    Column("idle", number=True, detail=True),
    Column("last", "last to arrive", number=True),
)


@dataclass(frozen=True)
class ProfiledOverlap:
    """The profiled steps; `ranks` has no rows where no trace could be used."""

    ranks: Table
    buckets: Table
    shares: dict[int, Shares]

    @property
    def longest_ns(self) -> int:
        return max((each.span_ns for each in self.shares.values()), default=0)


def profiled_overlap(report: Report) -> ProfiledOverlap | None:
    """None if no step was profiled."""
    overlap = report.overlap
    if overlap is None:
        return None
    steps = max(len(overlap.steps) or overlap.end_step - overlap.first_step, 1)
    ranks = Table(
        _title(overlap),
        _COLUMNS,
        tuple(_rank_row(rank, steps) for rank in overlap.ranks),
        subtitle=_subtitle(overlap),
        notes=overlap.left_out,
        noun="ranks",
    )
    columns = (
        Column("step"),
        *numbers(("bucket", "size", "transfer", "skew", "last rank", "bus bandwidth")),
    )
    buckets = Table("Buckets", columns, tuple(map(_bucket_row, overlap.buckets)), noun="reductions")
    return ProfiledOverlap(ranks, buckets, {rank.rank: _shares(rank) for rank in overlap.ranks})


def _title(overlap: Overlap) -> str:
    own = " (profile of the training script)" if overlap.source == "user" and overlap.ranks else ""
    last = overlap.end_step - 1
    if last < overlap.first_step or not overlap.ranks:
        return f"Overlap{own}"
    steps = f"steps {overlap.first_step}-{last}" if last > overlap.first_step else f"step {last}"
    return f"Overlap in {steps}{own}"


def _subtitle(overlap: Overlap) -> str:
    if not overlap.steps:
        return "mean per step" if overlap.ranks else ""
    took = sum(step.took_ns for step in overlap.steps) // len(overlap.steps)
    return f"mean per step; a step takes {time_text(took)}"


def _rank_row(rank: RankOverlap, steps: int) -> Row:
    return row(
        [
            rank.rank,
            time_text(rank.compute_ns // steps),
            time_text(rank.comm_ns // steps),
            percent_text(rank.overlap_pct),
            time_text(rank.exposed_ns // steps),
            _per_step(rank.exposed_transfer_ns, steps),
            _per_step(rank.exposed_wait_ns, steps),
            time_text(rank.idle_ns // steps),
            None if rank.last_arrivals is None else f"{rank.last_arrivals}x",
        ],
        weight=rank.exposed_ns,
        ranks=[rank.rank],
    )


def _per_step(nanoseconds: int | None, steps: int) -> str | None:
    return None if nanoseconds is None else time_text(nanoseconds // steps)


def _shares(rank: RankOverlap) -> Shares:
    return Shares(
        span_ns=rank.span_ns,
        comm_ns=rank.comm_ns,
        compute_ns=rank.compute_ns,
        overlap_ns=rank.overlap_ns,
        exposed_ns=rank.exposed_ns,
        copy_ns=rank.copy_ns,
        idle_ns=rank.idle_ns,
    )


def _bucket_row(bucket: BucketOverlap) -> Row:
    return row(
        [
            f"step {bucket.step}",
            bucket.bucket,
            optional_size_text(bucket.bytes) or None,
            time_text(bucket.transfer_ns) or None,
            time_text(bucket.skew_ns) or None,
            bucket.last_rank,
            rate_text(bucket.busbw_gbps) or None,
        ]
    )
