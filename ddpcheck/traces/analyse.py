"""Analyses the traces of one or several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ddpcheck.traces.collectives import Match, clocks, compared, last_arrivals, matches, on_one_clock, waits
from ddpcheck.traces.model import (
    BucketSummary,
    CollectiveResult,
    Headline,
    OperationSummary,
    RankClockOffset,
    RankResult,
    Shares,
    StepShares,
    TraceResult,
)
from ddpcheck.traces.rank_trace import Cover, Interval, RankTrace


def analyse(traces: Sequence[RankTrace]) -> TraceResult:
    """All results, with clock offsets between ranks corrected."""
    known = clocks(matches(traces))
    aligned = on_one_clock(traces, known)
    origin = min(_first_time(trace) for trace in aligned)
    compute = {trace.rank: Cover([(start, end) for start, end, _ in trace.compute]) for trace in aligned}
    together, alone = _collectives(aligned, compute, origin)
    ranks = _ranks(aligned, compute, together, known, origin)
    collectives = sorted([*together, *alone], key=lambda each: min(part.start_ns for part in each.parts))
    return TraceResult(
        headline=headline(ranks, collectives),
        ranks=ranks,
        collectives=tuple(collectives),
        operations=operations(collectives),
        buckets=buckets(collectives),
        transfer_ns=sum(each.transfer_ns or 0 for each in together) if together else None,
        matched=len(together),
        unmatched=len(alone) if len(aligned) > 1 else 0,
        world_size=_world_size(aligned),
        origin_ns=origin,
    )


def _collectives(
    traces: Sequence[RankTrace], compute: Mapping[int, Cover], origin: int
) -> tuple[list[CollectiveResult], list[CollectiveResult]]:
    """Collectives matched across ranks, and unmatched ones."""
    world_size = _world_size(traces)
    matched = matches(traces)
    taken = {id(each) for match in matched for each in match.values()}
    alone: list[Match] = [
        {trace.rank: each} for trace in traces for each in trace.collectives if id(each) not in taken
    ]
    return (
        [compared(match, compute, world_size, origin) for match in matched],
        [compared(match, compute, world_size, origin) for match in alone],
    )


def _ranks(
    traces: Sequence[RankTrace],
    compute: Mapping[int, Cover],
    together: Sequence[CollectiveResult],
    known: Mapping[int, RankClockOffset],
    origin: int,
) -> tuple[RankResult, ...]:
    waited, last = waits(together), last_arrivals(together)
    return tuple(
        RankResult(
            rank=trace.rank,
            file=trace.file,
            source=trace.source,
            shares=total_shares(trace, compute[trace.rank]),
            steps=by_step(trace, origin),
            collectives=len(trace.collectives),
            wait_ns=waited.get(trace.rank),
            last_arrivals=last[trace.rank] if trace.rank in waited else None,
            clock=known.get(trace.rank),
        )
        for trace in traces
    )


def _world_size(traces: Sequence[RankTrace]) -> int | None:
    sizes = {trace.world_size for trace in traces}
    return sizes.pop() if len(sizes) == 1 else None


def _first_time(trace: RankTrace) -> int:
    """The earliest time in a trace: of a step, a call or device work."""
    starts = [start for start, _, _ in (*trace.compute, *trace.copies)]
    starts += [time for each in trace.collectives for time in (each.start, each.ready or each.start)]
    return min(starts + [step.start for step in trace.steps])


def total_shares(trace: RankTrace, compute: Cover) -> Shares:
    """Time shares of the whole file."""
    comm = Cover([(each.start, each.end) for each in trace.collectives])
    return _shares(comm, compute, Cover([(start, end) for start, end, _ in trace.copies]))


def by_step(trace: RankTrace, origin: int) -> tuple[StepShares, ...]:
    """Time shares of each step; work belongs to the step that launched it."""
    comm = _by_number((each.step, each.start, each.end) for each in trace.collectives)
    compute = _by_number((step, start, end) for start, end, step in trace.compute)
    copies = _by_number((step, start, end) for start, end, step in trace.copies)
    marked: dict[int | None, int] = {step.number: step.start for step in reversed(trace.steps)}
    return tuple(
        _step(number, begin, origin, comm[number], compute[number], copies[number])
        for number, begin in sorted(marked.items(), key=lambda item: item[1]) or [(None, origin)]
    )


def _by_number(work: Iterable[tuple[int | None, int, int]]) -> defaultdict[int | None, list[Interval]]:
    by_step: defaultdict[int | None, list[Interval]] = defaultdict(list)
    for step, start, end in work:
        by_step[step].append((start, end))
    return by_step


def _step(number: int | None, begin: int, origin: int, *work: Iterable[Interval]) -> StepShares:
    comm, compute, copies = map(Cover, work)
    # On a GPU a step begins with its first work, which may run long after the CPU began the step.
    starts = [cover.starts[0] for cover in (comm, compute, copies) if cover.starts]
    return StepShares(number, min(starts, default=begin) - origin, _shares(comm, compute, copies))


def _shares(comm: Cover, compute: Cover, copies: Cover) -> Shares:
    overlap = comm.shared(compute)
    copies_alone = copies.without(comm).without(compute).length
    busy = comm.length + compute.length - overlap + copies_alone
    covers = [cover for cover in (comm, compute, copies) if cover.starts]
    span = max(cover.ends[-1] for cover in covers) - min(cover.starts[0] for cover in covers) if covers else 0
    return Shares(
        span_ns=span,
        comm_ns=comm.length,
        compute_ns=compute.length,
        overlap_ns=overlap,
        exposed_ns=comm.length - overlap,
        copy_ns=copies_alone,
        idle_ns=span - busy,
    )


def headline(ranks: Sequence[RankResult], collectives: Sequence[CollectiveResult]) -> Headline:
    """Means over ranks, and the rank that arrived last most often."""
    matched = [each for each in collectives if each.transfer_ns is not None]
    comm = sum(rank.shares.comm_ns for rank in ranks)
    overlap = sum(rank.shares.overlap_ns for rank in ranks)
    waited = [rank.wait_ns for rank in ranks if rank.wait_ns is not None]
    most = max(rank.last_arrivals or 0 for rank in ranks)
    last = [rank.rank for rank in ranks if rank.last_arrivals == most]
    return Headline(
        comm_ns=comm // len(ranks),
        overlap_pct=round(100 * overlap / comm, 3) if comm else 0.0,
        exposed_ns=(comm - overlap) // len(ranks),
        span_ns=sum(rank.shares.span_ns for rank in ranks) // len(ranks),
        wait_ns=sum(waited) // len(waited) if waited else None,
        transfer_ns=sum(each.transfer_ns or 0 for each in matched) if matched else None,
        most_often_last=last[0] if most and len(last) == 1 else None,
        times_last=most,
        matched=len(matched),
    )


def operations(collectives: Sequence[CollectiveResult]) -> tuple[OperationSummary, ...]:
    """Collectives grouped by kind and size, the longest total duration first."""
    groups = _grouped(collectives, lambda each: (each.kind, each.group, each.bytes, each.bucket is None))
    summaries = (_operation(group) for group in groups)
    return tuple(sorted(summaries, key=lambda each: -each.duration_ns * each.count))


def buckets(collectives: Sequence[CollectiveResult]) -> tuple[BucketSummary, ...]:
    """DDP's buckets in order of reduction, over all steps and ranks."""
    reductions = [each for each in collectives if each.bucket is not None]
    groups = _grouped(reductions, lambda each: each.bucket)
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
        duration_ns=_median(part.duration_ns for each in group for part in each.parts) or 0,
        transfer_ns=_median(each.transfer_ns for each in group),
        skew_ns=_median(each.skew_ns for each in group),
        algbw_gbps=_median_rate(each.algbw_gbps for each in group),
        busbw_gbps=_median_rate(each.busbw_gbps for each in group),
    )


def _bucket(group: Sequence[CollectiveResult]) -> BucketSummary:
    parts = [part for each in group for part in each.parts]
    sizes = {each.bytes for each in group}
    took = sum(part.duration_ns for part in parts)
    return BucketSummary(
        bucket=group[0].bucket or 0,
        # DDP rebuilds buckets after the first step; a size that changes is unknown.
        bytes=sizes.pop() if len(sizes) == 1 else None,
        count=len(group),
        queued_ns=_median(part.start_ns - part.ready_ns for part in parts if part.ready_ns is not None),
        duration_ns=_median(part.duration_ns for part in parts) or 0,
        transfer_ns=_median(each.transfer_ns for each in group),
        hidden_pct=round(100 * sum(part.hidden_ns for part in parts) / took, 3) if took else 0.0,
        algbw_gbps=_median_rate(each.algbw_gbps for each in group),
        busbw_gbps=_median_rate(each.busbw_gbps for each in group),
    )


def _median(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(median(known)) if known else None


def _median_rate(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 3) if known else None
