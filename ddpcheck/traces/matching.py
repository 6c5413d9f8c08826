"""Which collectives of different ranks are one and the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpcheck.traces.kernels import Kind
from ddpcheck.traces.rank_trace import Collective, RankTrace

# Between two ranks only: their order says nothing about the other ranks.
_PAIRWISE = (Kind.SEND, Kind.RECV)
# One collective, by rank.
Match = Mapping[int, Collective]


def matches(traces: Sequence[RankTrace]) -> list[Match]:
    """By process group and sequence number; where traces have none, by group, kind and order within a step.

    Where ranks show different counts, nobody can say which belong together: those are left out.
    """
    with_steps = _same_steps(traces)
    rows: dict[Any, dict[int, list[Collective]]] = {}
    for trace in traces:
        for each in trace.collectives:
            if each.kind in _PAIRWISE:
                continue
            rows.setdefault(_key(each, with_steps), {}).setdefault(trace.rank, []).append(each)
    found = [match for row in rows.values() for match in _matched(row, traces)]
    return sorted(found, key=lambda match: min(each.start for each in match.values()))


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
    # A kernel from before the recording: which operation it was is not known, so neither is its partner.
    unplaced = first.step is None and any(trace.steps for trace in traces)
    if first.message.sequence is None and unplaced and first.kind is Kind.UNKNOWN:
        return
    for index in range(counts.pop()):
        yield {rank: each[index] for rank, each in row.items()}
