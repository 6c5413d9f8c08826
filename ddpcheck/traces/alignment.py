"""Clock offsets between ranks, from the ends of common collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ddpcheck.traces.collectives import Match
from ddpcheck.traces.messages import CollectiveKind
from ddpcheck.traces.model import RankClockOffset
from ddpcheck.traces.rank_trace import Collective, RankTrace

# No rank can leave these before all have arrived, so they end together. The root of a broadcast may leave early.
_SYNCHRONIZING = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.BARRIER,
)
# Ends differ by a few microseconds even on one clock: a smaller correction would only add noise. A larger offset
# must also exceed the residuals.
_NOISE_NS = 50_000
_MIN_RESIDUALS = 3


def clocks(matched: Sequence[Match]) -> dict[int, RankClockOffset]:
    """Each rank's offset: the median over collectives of its end minus the median end of all ranks."""
    deviations: dict[int, list[float]] = {}
    for match in _usable_for_clocks(matched):
        # Relative to one of the ends: nanoseconds since 1970 do not fit a float.
        base = min(each.end for each in match.values())
        middle = median(each.end - base for each in match.values())
        for rank, each in match.items():
            deviations.setdefault(rank, []).append(each.end - base - middle)
    return {rank: _clock(each) for rank, each in sorted(deviations.items())}


def _usable_for_clocks(matched: Sequence[Match]) -> list[Match]:
    """Only the largest groups: ranks of a small group may share a clock and bias the median."""
    for kinds in ((CollectiveKind.ALL_REDUCE,), _SYNCHRONIZING):
        usable = [match for match in matched if next(iter(match.values())).kind in kinds]
        if usable:
            most = max(map(len, usable))
            return [match for match in usable if len(match) == most]
    return []


def _clock(deviations: Sequence[float]) -> RankClockOffset:
    offset = median(deviations)
    residual = median(abs(each - offset) for each in deviations)
    significant = abs(offset) > max(_NOISE_NS, _MIN_RESIDUALS * residual)
    return RankClockOffset(round(offset), round(residual), len(deviations), significant)


def on_one_clock(
    traces: Sequence[RankTrace], by_rank: Mapping[int, RankClockOffset | None]
) -> list[RankTrace]:
    """The traces with significant clock offsets subtracted."""
    return [_corrected(trace, by_rank.get(trace.rank)) for trace in traces]


def _corrected(trace: RankTrace, clock: RankClockOffset | None) -> RankTrace:
    if clock is None or not clock.corrected:
        return trace
    by = clock.offset_ns
    return replace(
        trace,
        collectives=tuple(_shifted(each, by) for each in trace.collectives),
        compute=tuple((start - by, end - by, step) for start, end, step in trace.compute),
        copies=tuple((start - by, end - by, step) for start, end, step in trace.copies),
        steps=tuple(replace(step, start=step.start - by, end=step.end - by) for step in trace.steps),
        own=tuple((start - by, end - by) for start, end in trace.own),
    )


def _shifted(each: Collective, by: int) -> Collective:
    ready = None if each.ready is None else each.ready - by
    return replace(each, start=each.start - by, end=each.end - by, ready=ready)
