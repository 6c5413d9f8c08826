"""From the traces of one or several ranks to the finished analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.traces import shares, summary
from ddpcheck.traces.alignment import clocks, on_one_clock
from ddpcheck.traces.collectives import compared, last_arrivals, waits
from ddpcheck.traces.intervals import Cover
from ddpcheck.traces.matching import Match, matches
from ddpcheck.traces.model import Clock, CollectiveResult, RankResult, TraceResult
from ddpcheck.traces.rank_trace import RankTrace


def analyse(traces: Sequence[RankTrace]) -> TraceResult:
    """All figures, on one clock where the ranks' own clocks differ."""
    known = clocks(matches(traces))
    aligned = on_one_clock(traces, known)
    origin = min(_first_moment(trace) for trace in aligned)
    compute = {trace.rank: Cover([(start, end) for start, end, _ in trace.compute]) for trace in aligned}
    together, alone = _collectives(aligned, compute, origin)
    ranks = _ranks(aligned, compute, together, known, origin)
    collectives = sorted([*together, *alone], key=lambda each: min(part.start_ns for part in each.parts))
    return TraceResult(
        headline=summary.headline(ranks, collectives),
        ranks=ranks,
        collectives=tuple(collectives),
        operations=summary.operations(collectives),
        buckets=summary.buckets(collectives),
        transfer_ns=sum(each.transfer_ns or 0 for each in together) if together else None,
        matched=len(together),
        unmatched=len(alone) if len(aligned) > 1 else 0,
        world_size=_world_size(aligned),
        origin_ns=origin,
    )


def _collectives(
    traces: Sequence[RankTrace], compute: Mapping[int, Cover], origin: int
) -> tuple[list[CollectiveResult], list[CollectiveResult]]:
    """Those that several ranks show, and those that stand alone."""
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
    known: Mapping[int, Clock],
    origin: int,
) -> tuple[RankResult, ...]:
    waited, last = waits(together), last_arrivals(together)
    return tuple(
        RankResult(
            rank=trace.rank,
            file=trace.file,
            source=trace.source,
            shares=shares.whole(trace, compute[trace.rank]),
            steps=shares.by_step(trace, origin),
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


def _first_moment(trace: RankTrace) -> int:
    """The earliest thing that is known of a rank: a step, a call, or work on the device."""
    starts = [start for start, _, _ in (*trace.compute, *trace.copies)]
    starts += [moment for each in trace.collectives for moment in (each.start, each.ready or each.start)]
    return min(starts + [step.start for step in trace.steps])
