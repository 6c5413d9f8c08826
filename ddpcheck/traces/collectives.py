"""What one collective cost over ranks: who waited, who came last, and how long the transfer itself took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ddpcheck.traces.bandwidth import algorithm_bandwidth, bus_bandwidth
from ddpcheck.traces.intervals import Cover
from ddpcheck.traces.matching import Match
from ddpcheck.traces.messages import Message
from ddpcheck.traces.model import CollectiveResult, Part
from ddpcheck.traces.rank_trace import Collective


def compared(
    match: Match, compute: Mapping[int, Cover], world_size: int | None, origin: int
) -> CollectiveResult:
    """One collective, over one rank or several; moments of all ranks are on one clock by now."""
    alone = len(match) == 1
    first = next(iter(match.values()))
    latest = max(each.start for each in match.values())
    shortest = min(each.duration for each in match.values())
    message = _told(match.values())
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


def _told(collectives: Iterable[Collective]) -> Message:
    message = Message()
    for each in collectives:
        message = message.filled_from(each.message)
    return message


def _last(match: Match, latest: int) -> int | None:
    last = [rank for rank, each in match.items() if each.start == latest]
    return last[0] if len(last) == 1 else None


def last_arrivals(collectives: Iterable[CollectiveResult]) -> Counter[int]:
    """How often each rank was the one that all others waited for."""
    return Counter(each.last_rank for each in collectives if each.last_rank is not None)


def waits(collectives: Iterable[CollectiveResult]) -> dict[int, int]:
    """How long each rank waited for the last one, over all collectives that were matched."""
    total: dict[int, int] = {}
    for each in collectives:
        for part in each.parts:
            if part.wait_ns is not None:
                total[part.rank] = total.get(part.rank, 0) + part.wait_ns
    return total
