"""Clocks of several ranks brought together by the ends of the collectives they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ddpcheck.traces.collectives import Match
from ddpcheck.traces.kernels import CollectiveKind
from ddpcheck.traces.model import RankClockOffset
from ddpcheck.traces.rank_trace import Collective, RankTrace

# Nobody can leave these before everybody has arrived, so ranks end them together. A broadcast's root may go early.
_END_TOGETHER = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.BARRIER,
)
# Ends differ by a few microseconds even on one clock: a correction below that would only add noise. Above it,
# an offset has to stand out of the scatter too.
_NOISE_NS = 50_000
_OUT_OF_SCATTER = 3


def clocks(matched: Sequence[Match]) -> dict[int, RankClockOffset]:
    """Each rank's offset: the median over collectives of its end minus the median end of all ranks."""
    deviations: dict[int, list[float]] = {}
    for match in _telling(matched):
        # Counted from one of the ends: moments since 1970 are too long for a float.
        base = min(each.end for each in match.values())
        middle = median(each.end - base for each in match.values())
        for rank, each in match.items():
            deviations.setdefault(rank, []).append(each.end - base - middle)
    return {rank: _clock(each) for rank, each in sorted(deviations.items())}


def _telling(matched: Sequence[Match]) -> list[Match]:
    """The largest groups only: neighbours in a small one share a clock, and would outvote the whole."""
    for kinds in ((CollectiveKind.ALL_REDUCE,), _END_TOGETHER):
        telling = [match for match in matched if next(iter(match.values())).kind in kinds]
        if telling:
            most = max(map(len, telling))
            return [match for match in telling if len(match) == most]
    return []


def _clock(deviations: Sequence[float]) -> RankClockOffset:
    offset = median(deviations)
    residual = median(abs(each - offset) for each in deviations)
    stands_out = abs(offset) > max(_NOISE_NS, _OUT_OF_SCATTER * residual)
    return RankClockOffset(round(offset), round(residual), len(deviations), stands_out)


def on_one_clock(
    traces: Sequence[RankTrace], by_rank: Mapping[int, RankClockOffset | None]
) -> list[RankTrace]:
    """The same traces, with the offsets of clocks that stood out taken away."""
    return [_corrected(trace, by_rank.get(trace.rank)) for trace in traces]


def _corrected(trace: RankTrace, clock: RankClockOffset | None) -> RankTrace:
    if clock is None or not clock.corrected:
        return trace
    by = clock.offset_ns
    return replace(
        trace,
        collectives=tuple(_moved(each, by) for each in trace.collectives),
        compute=tuple((start - by, end - by, step) for start, end, step in trace.compute),
        copies=tuple((start - by, end - by, step) for start, end, step in trace.copies),
        steps=tuple(replace(step, start=step.start - by, end=step.end - by) for step in trace.steps),
        own=tuple((start - by, end - by) for start, end in trace.own),
    )


def _moved(each: Collective, by: int) -> Collective:
    ready = None if each.ready is None else each.ready - by
    return replace(each, start=each.start - by, end=each.end - by, ready=ready)
