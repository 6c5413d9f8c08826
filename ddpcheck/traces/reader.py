"""From paths to rank traces, and a clear word about every file that is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpcheck.errors import TraceIsTimeline, TraceUnreadable, TraceWithoutCommunication, UserError
from ddpcheck.traces.build import Identity, build
from ddpcheck.traces.event_filter import Sieve
from ddpcheck.traces.events import EventReader
from ddpcheck.traces.rank_trace import RankTrace
from ddpcheck.traces.ranks import rank_of, world_size_of
from ddpcheck.traces.sources import Source, in_order, sources

_UNKNOWN_RANK = -1


@dataclass(frozen=True)
class Loaded:
    """The traces that could be read, by rank, and one sentence for each file that could not."""

    traces: tuple[RankTrace, ...]
    left_out: tuple[str, ...]


def load(given: Sequence[Path]) -> Loaded:
    """Read everything that `given` leads to.

    A file that was named and is no trace is an error. A folder or an archive may hold other files as well:
    those are left out and named, unless nothing else is there.
    """
    traces: list[RankTrace] = []
    left_out: list[UserError] = []
    with _no_garbage():
        for source in sources(given):
            try:
                traces.append(read_trace(source))
            except TraceIsTimeline:
                # A folder may hold what `--merged` wrote there before.
                if source.asked_for:
                    raise
            except (TraceUnreadable, TraceWithoutCommunication) as error:
                if source.asked_for:
                    raise
                left_out.append(error)
    if not traces:
        raise _nothing_left(left_out)
    return Loaded(_by_rank(traces), tuple(map(str, left_out)))


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Millions of small objects are made here and no cycle of them: looking for some takes time for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_trace(source: Source) -> RankTrace:
    """The trace in one file."""
    sieve, facts = _sifted(source, Sieve())
    if not sieve.kernels and sieve.collective_spans:
        # The processor did the computing. Its operations are many, and nobody else needs them.
        sieve, facts = _sifted(source, Sieve(with_operations=True))
    if "ddpcheck" in facts:
        raise TraceIsTimeline(
            f"{source.name} is a timeline that ddpcheck wrote: give the traces it was made from"
        )
    if not (sieve.collective_kernels or sieve.collective_spans):
        raise _no_communication(source, sieve)
    info = facts.get("distributed_info")
    rank = rank_of(source.name, info, sieve.rank_in_args)
    base = facts.get("base_time_nanoseconds")
    identity = Identity(
        rank=_UNKNOWN_RANK if rank is None else rank,
        file=source.name,
        world_size=world_size_of(info),
        base_ns=base if isinstance(base, int) else 0,
    )
    return build(sieve, identity)


def _sifted(source: Source, sieve: Sieve) -> tuple[Sieve, dict[str, Any]]:
    with source.open() as file:
        reader = EventReader(file, source.name, sieve.thinner)
        for events in reader:
            try:
                sieve.take(events)
            except (ValueError, TypeError, AttributeError) as error:
                raise TraceUnreadable(f"{source.name} holds an event that makes no sense: {error}") from None
    return sieve, reader.facts


def _no_communication(source: Source, sieve: Sieve) -> TraceWithoutCommunication:
    if any(mark.name.startswith("nccl:") for marks in sieve.marks.values() for mark in marks):
        return TraceWithoutCommunication(
            f"{source.name} shows that NCCL was called but no GPU kernel of it: record the trace with "
            "ProfilerActivity.CUDA too"
        )
    return TraceWithoutCommunication(
        f"{source.name} holds no communication: neither NCCL or RCCL kernels nor spans of gloo"
    )


def _nothing_left(left_out: Sequence[UserError]) -> UserError:
    if not left_out:
        return TraceUnreadable("there is no trace here, only a timeline that ddpcheck wrote")
    more = f" (and {len(left_out) - 1} more files that are of no use)" if len(left_out) > 1 else ""
    return type(left_out[0])(f"{left_out[0]}{more}")


def _by_rank(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    unknown = sorted(
        (trace for trace in traces if trace.rank == _UNKNOWN_RANK), key=lambda trace: in_order(trace.file)
    )
    taken = {trace.rank for trace in traces} - {_UNKNOWN_RANK}
    free = (number for number in range(len(traces)) if number not in taken)
    named = [trace for trace in traces if trace.rank != _UNKNOWN_RANK]
    named += [replace(trace, rank=number) for trace, number in zip(unknown, free, strict=False)]
    named.sort(key=lambda trace: trace.rank)
    for one, other in pairwise(named):
        if one.rank == other.rank:
            raise TraceUnreadable(
                f"{one.file} and {other.file} are both of rank {one.rank}: give one file a rank, "
                "of the same steps"
            )
    return tuple(named)
