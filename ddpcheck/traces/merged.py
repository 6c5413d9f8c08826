"""One timeline of all ranks on one clock, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from ddpcheck.errors import UserError
from ddpcheck.traces.collectives import on_one_clock
from ddpcheck.traces.model import TRACE_SCHEMA, CollectiveResult, Part, TraceResult
from ddpcheck.traces.rank_trace import Cover, RankTrace

JsonEvent = dict[str, Any]

# Lanes of a rank from top to bottom; streams and buckets follow in their order.
_STEPS, _COMPUTE, _COPIES, _FIRST_STREAM, _FIRST_BUCKET = 0, 1, 2, 100, 1000
# Perfetto shows the thread whose id equals its process id on top: steps get that id, and no other lane may.
_OTHER_LANES = 1_000_000


def write_merged(traces: Sequence[RankTrace], result: TraceResult, out: Path) -> None:
    """Write the timeline to `out`, compressed where the name ends in .gz."""
    try:
        with gzip.open(out, "wt", encoding="utf-8") if out.name.endswith(".gz") else out.open("w") as file:
            file.write(f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {result.origin_ns},\n')
            file.write(f'"ddpcheck": {json.dumps(_about(result))},\n"traceEvents": [')
            for number, event in enumerate(timeline(traces, result)):
                file.write(",\n" if number else "\n")
                file.write(json.dumps(event))
            file.write("\n]}\n")
    except OSError as error:
        raise UserError(f"the timeline cannot be written to {out}: {error.strerror or error}") from None


def timeline(traces: Sequence[RankTrace], result: TraceResult) -> Iterator[JsonEvent]:
    """Every event of the timeline; a rank is a process, numbered by its rank."""
    aligned = on_one_clock(traces, {rank.rank: rank.clock for rank in result.ranks})
    lanes = {trace.rank: _stream_lanes(trace) for trace in aligned}
    for trace in aligned:
        yield from _names(trace, lanes[trace.rank])
        yield from _work(trace, result.origin_ns)
    done: dict[tuple[int, int], int] = {}
    arrows = count()
    for collective in result.collectives:
        for part in collective.parts:
            yield from _reduction(collective, part, lanes[part.rank][part.lane])
            if collective.bucket is not None:
                yield from _bucket(collective, part, done)
        yield from _arrows(collective, lanes, arrows)


def _about(result: TraceResult) -> dict[str, Any]:
    clocks = {str(rank.rank): asdict(rank.clock) for rank in result.ranks if rank.clock}
    return {"schema": TRACE_SCHEMA, "clocks": clocks}


def _stream_lanes(trace: RankTrace) -> dict[str, int]:
    streams = dict.fromkeys(each.lane for each in trace.collectives)
    return {lane: _FIRST_STREAM + number for number, lane in enumerate(streams)}


def _names(trace: RankTrace, streams: Mapping[str, int]) -> Iterator[JsonEvent]:
    yield _metadata(trace.rank, 0, "process_name", name=f"rank {trace.rank}")
    yield _metadata(trace.rank, 0, "process_sort_index", sort_index=trace.rank)
    where = "stream" if trace.source == "GPU kernels" else "thread"
    buckets = sorted({each.bucket for each in trace.collectives if each.bucket is not None})
    lanes = {_STEPS: "steps", _COMPUTE: "compute"}
    lanes |= {_COPIES: "copies"} if trace.copies else {}
    lanes |= {lane: f"communication, {where} {stream}" for stream, lane in streams.items()}
    lanes |= {_FIRST_BUCKET + bucket: f"bucket {bucket}" for bucket in buckets}
    for lane, name in lanes.items():
        yield _metadata(trace.rank, lane, "thread_name", name=name)
        yield _metadata(trace.rank, lane, "thread_sort_index", sort_index=lane)


def _work(trace: RankTrace, origin: int) -> Iterator[JsonEvent]:
    for step in trace.steps:
        yield _slice(trace.rank, _STEPS, f"step {step.number}", step.start - origin, step.end - origin)
    for lane, name, pieces in ((_COMPUTE, "compute", trace.compute), (_COPIES, "copy", trace.copies)):
        for start, end in Cover((start, end) for start, end, _ in pieces):
            yield _slice(trace.rank, lane, name, start - origin, end - origin)


def _reduction(collective: CollectiveResult, part: Part, lane: int) -> Iterator[JsonEvent]:
    args = {
        "kernel": collective.name,
        "bytes": collective.bytes,
        "dtype": collective.dtype,
        "process group": collective.group,
        "hidden us": part.hidden_ns / 1000,
        "exposed us": part.exposed_ns / 1000,
        "bus bandwidth GB/s": collective.busbw_gbps,
    }
    known = {name: value for name, value in args.items() if value is not None}
    yield _slice(part.rank, lane, _title(collective), part.start_ns, part.end_ns, **known)
    # Waiting and transfer are slices inside it.
    if part.wait_ns and collective.last_rank is not None:
        until = min(part.start_ns + part.wait_ns, part.end_ns)
        yield _slice(part.rank, lane, f"waits for rank {collective.last_rank}", part.start_ns, until)
        if until < part.end_ns:
            yield _slice(part.rank, lane, "transfer", until, part.end_ns)


def _title(collective: CollectiveResult) -> str:
    return collective.kind if collective.bucket is None else f"{collective.kind}, bucket {collective.bucket}"


def _bucket(
    collective: CollectiveResult, part: Part, done: dict[tuple[int, int], int]
) -> Iterator[JsonEvent]:
    """A lane per bucket: when it was ready and when it was reduced."""
    lane = _FIRST_BUCKET + (collective.bucket or 0)
    # The CPU may run ahead: a bucket can be ready before that of the previous step is reduced.
    before = done.get((part.rank, lane), 0)
    if part.ready_ns is not None and max(part.ready_ns, before) < part.start_ns:
        since = {"ready since us": part.ready_ns / 1000}
        yield _slice(part.rank, lane, "ready", max(part.ready_ns, before), part.start_ns, **since)
    yield _slice(part.rank, lane, "reduction", max(part.start_ns, before), part.end_ns)
    done[part.rank, lane] = part.end_ns


def _arrows(
    collective: CollectiveResult, lanes: Mapping[int, Mapping[str, int]], numbers: Iterator[int]
) -> Iterator[JsonEvent]:
    """Arrows from the rank that arrived last to each waiting rank, at the time its transfer begins.

    They do not point to the start of the wait: Perfetto reverses arrows that go back in time.
    """
    late = next((part for part in collective.parts if part.rank == collective.last_rank), None)
    if late is None:
        return
    for part in collective.parts:
        if part.rank == late.rank or not part.start_ns < late.start_ns < part.end_ns:
            continue
        arrow = {"name": "arrives last", "cat": "wait", "id": next(numbers)}
        time = late.start_ns / 1000
        for end, extra in ((late, {"ph": "s"}), (part, {"ph": "f", "bp": "e"})):
            thread = _thread(end.rank, lanes[end.rank][end.lane])
            yield {**extra, "ts": time, "pid": end.rank, "tid": thread, **arrow}


def _thread(rank: int, lane: int) -> int:
    return rank if lane == _STEPS else _OTHER_LANES + lane


def _slice(pid: int, lane: int, name: str, start: int, end: int, **args: Any) -> JsonEvent:
    event = {
        "ph": "X",
        "name": name,
        "cat": "ddpcheck",
        "pid": pid,
        "tid": _thread(pid, lane),
        "ts": start / 1000,
        "dur": max(0, end - start) / 1000,
    }
    return {**event, "args": args} if args else event


def _metadata(pid: int, lane: int, what: str, **args: Any) -> JsonEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": _thread(pid, lane), "ts": 0, "args": args}
