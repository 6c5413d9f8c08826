"""Synthetic profiled steps for tests of rules and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddpcheck.analysis.overlap.model import (
    BucketAdvice,
    BucketLayout,
    BucketOverlap,
    BucketPart,
    Overlap,
    RankOverlap,
    StepOverlap,
)

MS = 1_000_000
MIB = 1 << 20


def rank(number: int, compute_ms: float = 180, last: int = 0) -> RankOverlap:
    """Three steps of 100 ms each."""
    return RankOverlap(
        rank=number,
        file=f"traces/rank{number}.json.gz",
        span_ns=300 * MS,
        comm_ns=120 * MS,
        compute_ns=round(compute_ms * MS),
        overlap_ns=30 * MS,
        exposed_ns=90 * MS,
        copy_ns=0,
        idle_ns=30 * MS,
        overlap_pct=25.0,
        exposed_transfer_ns=75 * MS,
        exposed_wait_ns=15 * MS,
        wait_ns=21 * MS,
        last_arrivals=last,
        clock_offset_ns=0,
        clock_residual_ns=0,
        computing=((0, 20 * MS), (30 * MS, 50 * MS)),
    )


def bucket(step: int, number: int) -> BucketOverlap:
    part = BucketPart(rank=0, ready_ns=1, start_ns=2, end_ns=40 * MS, hidden_ns=3, exposed_ns=4, wait_ns=5)
    return BucketOverlap(
        step=step,
        bucket=number,
        bytes=4 * MIB,
        transfer_ns=30 * MS,
        skew_ns=5,
        last_rank=1,
        algbw_gbps=0.1,
        busbw_gbps=0.1,
        ranks=(part, replace(part, rank=1, ready_ns=None, wait_ns=None)),
    )


def advice(gain_ms: float = 20, step_ms: float = 100, first: float = 8, cap: float = 8) -> BucketAdvice:
    now = BucketLayout(MIB, 25 * MIB, 2, round(90 * MS))
    best = BucketLayout(round(first * MIB), round(cap * MIB), 4, round((90 - gain_ms) * MS))
    gain, step = round(gain_ms * MS), round(step_ms * MS)
    return BucketAdvice("0", 91 * MS, now, best, (best,), step, gain, 2 * MS, 0.5)


def overlap(
    exposed_ms: Sequence[float] = (25, 25, 25), took_ms: float = 100, compute_ms: float = 180, ranks: int = 2
) -> Overlap:
    """One step for each value of `exposed_ms`."""
    first = 5
    steps = tuple(
        StepOverlap(first + number, round(took_ms * MS), round(each * MS), 5 * MS)
        for number, each in enumerate(exposed_ms)
    )
    return Overlap(
        source="ddpcheck",
        first_step=first,
        end_step=first + len(steps),
        ranks=tuple(rank(number, compute_ms, last=3 * number) for number in range(ranks)),
        steps=steps,
        buckets=tuple(bucket(step.step, number) for step in steps for number in (0, 1)),
        transfer_ns=90 * MS,
        matched=6,
        unmatched=0,
        origin_ns=1_790_000_000_000_000_000,
    )
