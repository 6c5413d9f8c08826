"""Collectives matched across ranks: waits, last arrival and transfer time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddpcheck.traces.intervals import Cover
from ddpcheck.traces.messages import CollectiveKind, Message, algorithm_bandwidth, bus_bandwidth
from ddpcheck.traces.model import CollectiveResult, Part
from ddpcheck.traces.rank_trace import Collective, RankTrace

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
