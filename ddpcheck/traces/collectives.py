"""Collectives matched across ranks: waits, last arrival, clock offsets, exposed communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ddpcheck.traces.messages import CollectiveKind, Message, algorithm_bandwidth, bus_bandwidth
from ddpcheck.traces.model import CollectiveResult, Part, RankClockOffset, TraceResult
from ddpcheck.traces.rank_trace import Collective, Cover, Interval, RankTrace

# Between two ranks only: cannot be matched across all ranks.
_PAIRWISE = (CollectiveKind.SEND, CollectiveKind.RECV)
# One collective, by rank.
Match = Mapping[int, Collective]


def matches(traces: Sequence[RankTrace]) -> list[Match]:
    """By process group and sequence number; in traces without them, by group, kind and order within a step.

    Collectives whose counts differ between ranks cannot be matched and are left out.
    """
    with_steps = _same_steps(traces)
    rows: dict[Any, dict[int, list[Collective]]] = {}
    for trace in traces:
        for each in trace.collectives:
            if each.kind in _PAIRWISE:
                continue
            rows.setdefault(_key(each, with_steps), {}).setdefault(trace.rank, []).append(each)
    matched = [match for row in rows.values() for match in _matched(row, traces)]
    return sorted(matched, key=lambda match: min(each.start for each in match.values()))


def _key(each: Collective, with_steps: bool) -> tuple[Any, ...]:
    group = each.message.group, each.message.group_ranks
    if each.message.sequence is not None:
        return (*group, each.message.sequence, each.kind)
    return (*group, each.kind, each.step if with_steps else None, None)


def _same_steps(traces: Sequence[RankTrace]) -> bool:
    return len({tuple(step.number for step in trace.steps) for trace in traces}) == 1


def _matched(row: Mapping[int, Sequence[Collective]], traces: Sequence[RankTrace]) -> Iterator[Match]:
    counts = {len(each) for each in row.values()}
    if len(row) < 2 or len(counts) > 1:
        return
    first = next(iter(row.values()))[0]
    # A kernel launched before the recording: its operation is unknown, so it cannot be matched.
    unplaced = first.step is None and any(trace.steps for trace in traces)
    if first.message.sequence is None and unplaced and first.kind is CollectiveKind.UNKNOWN:
        return
    for index in range(counts.pop()):
        yield {rank: each[index] for rank, each in row.items()}


def compared(
    match: Match, compute: Mapping[int, Cover], world_size: int | None, origin: int
) -> CollectiveResult:
    """One collective, over one rank or several; times of all ranks are on one clock."""
    alone = len(match) == 1
    first = next(iter(match.values()))
    latest = max(each.start for each in match.values())
    shortest = min(each.duration for each in match.values())
    message = _combined_message(match.values())
    size = message.bytes_for(first.kind)
    group_size = message.group_size or world_size
    algorithm = algorithm_bandwidth(size, shortest)
    return CollectiveResult(
        kind=first.kind.value,
        name=first.name,
        group=message.group,
        group_size=group_size,
        step=first.step,
        bucket=first.bucket,
        elements=message.elements_in,
        dtype=message.dtype,
        bytes=size,
        transfer_ns=None if alone else shortest,
        skew_ns=None if alone else latest - min(each.start for each in match.values()),
        last_rank=None if alone else _last(match, latest),
        algbw_gbps=algorithm,
        busbw_gbps=bus_bandwidth(first.kind, algorithm, group_size),
        parts=tuple(
            _part(rank, each, compute[rank], None if alone else latest, origin)
            for rank, each in sorted(match.items())
        ),
    )


def _part(rank: int, each: Collective, compute: Cover, latest: int | None, origin: int) -> Part:
    hidden = compute.within(each.start, each.end)
    return Part(
        rank=rank,
        start_ns=each.start - origin,
        end_ns=each.end - origin,
        ready_ns=None if each.ready is None else each.ready - origin,
        hidden_ns=hidden,
        exposed_ns=each.duration - hidden,
        wait_ns=None if latest is None else latest - each.start,
        lane=each.lane,
    )


def _combined_message(collectives: Iterable[Collective]) -> Message:
    message = Message()
    for each in collectives:
        message = message.filled_from(each.message)
    return message


def _last(match: Match, latest: int) -> int | None:
    last = [rank for rank, each in match.items() if each.start == latest]
    return last[0] if len(last) == 1 else None


def last_arrivals(collectives: Iterable[CollectiveResult]) -> Counter[int]:
    """How often each rank arrived last."""
    return Counter(each.last_rank for each in collectives if each.last_rank is not None)


def waits(collectives: Iterable[CollectiveResult]) -> dict[int, int]:
    """Total time that each rank waited for the last one, over matched collectives."""
    total: dict[int, int] = {}
    for each in collectives:
        for part in each.parts:
            if part.wait_ns is not None:
                total[part.rank] = total.get(part.rank, 0) + part.wait_ns
    return total


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


@dataclass(frozen=True)
class Exposure:
    """One step of one rank, from collectives matched across ranks."""

    rank: int
    step: int
    # Duration of the step, without ddpcheck's own work.
    took_ns: int
    # Without concurrent compute: transfers, and waiting without concurrent transfer.
    transfer_ns: int
    wait_ns: int


def exposures(traces: Sequence[RankTrace], result: TraceResult) -> list[Exposure]:
    """Every marked step on every rank."""
    aligned = on_one_clock(traces, {rank.rank: rank.clock for rank in result.ranks})
    exposures: list[Exposure] = []
    for trace in aligned:
        compute = Cover((start, end) for start, end, _ in trace.compute)
        own = Cover(trace.own)
        parts = _by_step(trace.rank, result)
        for step in trace.steps:
            took = step.end - step.start - own.within(step.start, step.end)
            shares = _exposed(parts.get(step.number, []), compute, result.origin_ns)
            exposures.append(Exposure(trace.rank, step.number, took, *shares))
    return exposures


def _by_step(rank: int, result: TraceResult) -> dict[int | None, list[Part]]:
    parts: dict[int | None, list[Part]] = {}
    for collective in result.collectives:
        for part in collective.parts:
            if part.rank == rank and part.wait_ns is not None:
                parts.setdefault(collective.step, []).append(part)
    return parts


def _exposed(parts: Iterable[Part], compute: Cover, origin: int) -> tuple[int, int]:
    waits: list[Interval] = []
    transfers: list[Interval] = []
    for part in parts:
        start, end = part.start_ns + origin, part.end_ns + origin
        arrived = min(start + (part.wait_ns or 0), end)
        waits.append((start, arrived))
        transfers.append((arrived, end))
    transfer = Cover(transfers)
    return transfer.without(compute).length, Cover(waits).without(transfer).without(compute).length
