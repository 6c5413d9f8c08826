"""When each rank computed in the profiled steps, as coarse as a drawing of them needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpcheck.traces.alignment import on_one_clock
from ddpcheck.traces.intervals import Cover, Interval
from ddpcheck.traces.model import TraceResult
from ddpcheck.traces.rank_trace import RankTrace

# Of a step: shorter pauses would not show, and every one of thousands of operators would be written down.
FINEST = 1 / 150
# A drawing has no room for more, and report.json should not grow for it.
MOST_RANKS = 48


def computing(traces: Sequence[RankTrace], result: TraceResult) -> dict[int, tuple[Interval, ...]]:
    """By rank, from the moment that everything else in the result counts from; empty for very many ranks."""
    if len(traces) > MOST_RANKS:
        return {}
    aligned = on_one_clock(traces, {rank.rank: rank.clock for rank in result.ranks})
    return {trace.rank: _from(result.origin_ns, _coarse(trace)) for trace in aligned}


def _coarse(trace: RankTrace) -> Iterable[Interval]:
    """Pieces of compute with nothing but short pauses between them are one."""
    pieces = list(Cover((start, end) for start, end, _ in trace.compute))
    if not pieces:
        return
    least = FINEST * (pieces[-1][1] - pieces[0][0]) / max(1, len(trace.steps))
    begin, end = pieces[0]
    for start, until in pieces[1:]:
        if start - end >= least:
            yield begin, end
            begin = start
        end = until
    yield begin, end


def _from(origin: int, pieces: Iterable[Interval]) -> tuple[Interval, ...]:
    return tuple((start - origin, end - origin) for start, end in pieces)
