"""What a set of traces comes to: the headline, the operations and DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from ddpcheck.traces.model import BucketSummary, CollectiveResult, Headline, OperationSummary, RankResult


def headline(ranks: Sequence[RankResult], collectives: Sequence[CollectiveResult]) -> Headline:
    """Means over ranks, and the rank that the others waited for most often."""
    matched = [each for each in collectives if each.transfer_ns is not None]
    comm = sum(rank.shares.comm_ns for rank in ranks)
    overlap = sum(rank.shares.overlap_ns for rank in ranks)
    waited = [rank.wait_ns for rank in ranks if rank.wait_ns is not None]
    most = max(rank.last_arrivals or 0 for rank in ranks)
    often = [rank.rank for rank in ranks if rank.last_arrivals == most]
    return Headline(
        comm_ns=comm // len(ranks),
        overlap_pct=round(100 * overlap / comm, 3) if comm else 0.0,
        exposed_ns=(comm - overlap) // len(ranks),
        span_ns=sum(rank.shares.span_ns for rank in ranks) // len(ranks),
        wait_ns=sum(waited) // len(waited) if waited else None,
        transfer_ns=sum(each.transfer_ns or 0 for each in matched) if matched else None,
        most_often_last=often[0] if most and len(often) == 1 else None,
        times_last=most,
        matched=len(matched),
    )


def operations(collectives: Sequence[CollectiveResult]) -> tuple[OperationSummary, ...]:
    """Collectives of one kind and one size together, the costliest first."""
    groups = _grouped(collectives, lambda each: (each.kind, each.group, each.bytes, each.bucket is None))
    summaries = (_operation(group) for group in groups)
    return tuple(sorted(summaries, key=lambda each: -each.duration_ns * each.count))


def buckets(collectives: Sequence[CollectiveResult]) -> tuple[BucketSummary, ...]:
    """DDP's buckets in the order in which they are reduced, over all steps and ranks."""
    told = [each for each in collectives if each.bucket is not None]
    groups = _grouped(told, lambda each: each.bucket)
    return tuple(sorted((_bucket(group) for group in groups), key=lambda each: each.bucket))


def _grouped(
    collectives: Iterable[CollectiveResult], key: Callable[[CollectiveResult], Any]
) -> list[list[CollectiveResult]]:
    groups: dict[Any, list[CollectiveResult]] = {}
    for each in collectives:
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def _operation(group: Sequence[CollectiveResult]) -> OperationSummary:
    first = group[0]
    return OperationSummary(
        kind=first.kind,
        group=first.group,
        bytes=first.bytes,
        of_ddp=first.bucket is not None,
        count=len(group),
        duration_ns=_middle(part.duration_ns for each in group for part in each.parts) or 0,
        transfer_ns=_middle(each.transfer_ns for each in group),
        skew_ns=_middle(each.skew_ns for each in group),
        algbw_gbps=_middle_rate(each.algbw_gbps for each in group),
        busbw_gbps=_middle_rate(each.busbw_gbps for each in group),
    )


def _bucket(group: Sequence[CollectiveResult]) -> BucketSummary:
    parts = [part for each in group for part in each.parts]
    sizes = {each.bytes for each in group}
    took = sum(part.duration_ns for part in parts)
    return BucketSummary(
        bucket=group[0].bucket or 0,
        # Buckets are rebuilt after the first step; a size that changed is no size.
        bytes=sizes.pop() if len(sizes) == 1 else None,
        count=len(group),
        queued_ns=_middle(part.start_ns - part.ready_ns for part in parts if part.ready_ns is not None),
        duration_ns=_middle(part.duration_ns for part in parts) or 0,
        transfer_ns=_middle(each.transfer_ns for each in group),
        hidden_pct=round(100 * sum(part.hidden_ns for part in parts) / took, 3) if took else 0.0,
        algbw_gbps=_middle_rate(each.algbw_gbps for each in group),
        busbw_gbps=_middle_rate(each.busbw_gbps for each in group),
    )


def _middle(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(median(known)) if known else None


def _middle_rate(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 3) if known else None
