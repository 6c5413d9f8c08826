"""Builds the overlap analysis of an attempt from the traces of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.overlap.bucket_advice import bucket_advice
from ddpcheck.analysis.overlap.collector import ProfileCollector
from ddpcheck.analysis.overlap.model import (
    BucketOverlap,
    BucketPart,
    Overlap,
    RankOverlap,
    RankStepOverlap,
    StepOverlap,
)
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.errors import TraceUnreadable, UserError
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.timing import TraceRecord
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.collectives import Exposure, exposures, on_one_clock
from ddpcheck.traces.model import CollectiveResult, RankResult, TraceResult
from ddpcheck.traces.rank_trace import Cover, Interval, RankTrace
from ddpcheck.traces.reader import load

# Relative to a step: shorter gaps are not visible, and closing them avoids thousands of intervals.
FINEST = 1 / 150
# Limit of intervals in report.json.
MOST_RANKS = 48


def computing(traces: Sequence[RankTrace], result: TraceResult) -> dict[int, tuple[Interval, ...]]:
    """Compute intervals by rank, relative to the origin; empty for very many ranks."""
    if len(traces) > MOST_RANKS:
        return {}
    aligned = on_one_clock(traces, {rank.rank: rank.clock for rank in result.ranks})
    return {trace.rank: _from(result.origin_ns, _coarse(trace)) for trace in aligned}


def _coarse(trace: RankTrace) -> Iterable[Interval]:
    """Merge compute intervals with short gaps between them."""
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


OURS, THEIRS = "ddpcheck", "user"


def overlap_or_why(attempt: Attempt, folder: Path) -> Overlap | None:
    """The analysis, or the error: a bad trace must not prevent the rest of the report."""
    try:
        return overlap_of(attempt, folder)
    except Exception as error:
        return _nothing(attempt, [f"the traces could not be analysed ({type(error).__name__}: {error})"])


def overlap_of(attempt: Attempt, folder: Path) -> Overlap | None:
    """None if nothing was profiled."""
    if not attempt.collector(ProfileCollector):
        return None
    traces, left_out = traces_of(attempt, folder)
    if not traces:
        return _nothing(attempt, left_out)
    ours = _is_ours(attempt)
    result = analyse(traces)
    exposed = exposures(traces, result) if len(traces) > 1 else []
    computed = computing(traces, result)
    steps = _steps(exposed, len(traces))
    buckets = tuple(_bucket(each) for each in result.collectives if each.bucket is not None)
    # On a device, reductions share one stream; gloo runs two at a time.
    one_by_one = all(trace.source == "GPU kernels" for trace in traces)
    took = round(median(step.took_ns for step in steps)) if steps else 0
    return Overlap(
        source=OURS if ours else THEIRS,
        first_step=min((step.number for trace in traces for step in trace.steps), default=0),
        end_step=max((step.number + 1 for trace in traces for step in trace.steps), default=0),
        ranks=tuple(
            replace(
                _rank(each, exposed),
                held_up_ns=attempt.collector(ProfileCollector).traces[each.rank].held_up_ns,
                computing=computed.get(each.rank, ()),
            )
            for each in result.ranks
        ),
        steps=steps,
        buckets=buckets,
        transfer_ns=result.transfer_ns,
        matched=result.matched,
        unmatched=result.unmatched,
        origin_ns=result.origin_ns,
        advice=bucket_advice(attempt, buckets, one_by_one, took) if ours and steps else None,
        left_out=tuple(left_out),
    )


def _is_ours(attempt: Attempt) -> bool:
    return any(record.own for record in attempt.collector(ProfileCollector).traces.values())


def _nothing(attempt: Attempt, why: Sequence[str]) -> Overlap:
    source = OURS if _is_ours(attempt) else THEIRS
    return Overlap(source, 0, 0, (), (), (), None, 0, 0, 0, left_out=tuple(why))


def traces_of(attempt: Attempt, folder: Path) -> tuple[list[RankTrace], list[str]]:
    """The readable traces, and a message for each that is missing."""
    traces: list[RankTrace] = []
    left_out: list[str] = []
    for rank, record in sorted(attempt.collector(ProfileCollector).traces.items()):
        try:
            (trace,) = load([folder / record.file]).traces
        except UserError as error:
            left_out.append(str(error))
        else:
            traces.append(_cut(replace(trace, rank=rank, file=record.file), record))
    if attempt.collector(ProfileCollector).user_profiled:
        message = "the program profiles by itself, so ddpcheck did not"
        left_out.append(message if traces else f"{message}; it exported no trace that could be used")
    missing = sorted(
        set(attempt.ranks)
        - set(attempt.collector(ProfileCollector).traces)
        - attempt.collector(ProfileCollector).user_profiled
    )
    if missing:
        left_out.append(f"{name_ranks(missing)} left no trace")
    return traces, left_out


def _cut(trace: RankTrace, record: TraceRecord) -> RankTrace:
    """Only complete steps: drops work before them, and a truncated last step."""
    if not record.own:
        return trace
    kept = range(record.first, record.end)
    return replace(
        trace,
        collectives=tuple(each for each in trace.collectives if each.step in kept),
        compute=tuple(each for each in trace.compute if each[2] in kept),
        copies=tuple(each for each in trace.copies if each[2] in kept),
        steps=tuple(each for each in trace.steps if each.number in kept),
    )


def _rank(rank: RankResult, exposed: Sequence[Exposure]) -> RankOverlap:
    shares = rank.shares
    mine = [each for each in exposed if each.rank == rank.rank]
    return RankOverlap(
        rank=rank.rank,
        file=rank.file,
        span_ns=shares.span_ns,
        comm_ns=shares.comm_ns,
        compute_ns=shares.compute_ns,
        overlap_ns=shares.overlap_ns,
        exposed_ns=shares.exposed_ns,
        copy_ns=shares.copy_ns,
        idle_ns=shares.idle_ns,
        overlap_pct=shares.overlap_pct,
        exposed_transfer_ns=sum(each.transfer_ns for each in mine) if mine else None,
        exposed_wait_ns=sum(each.wait_ns for each in mine) if mine else None,
        wait_ns=rank.wait_ns,
        last_arrivals=rank.last_arrivals,
        clock_offset_ns=rank.clock.offset_ns if rank.clock else 0,
        clock_residual_ns=rank.clock.residual_ns if rank.clock else 0,
        by_step=tuple(
            RankStepOverlap(
                step=each.step,
                comm_ns=each.shares.comm_ns,
                compute_ns=each.shares.compute_ns,
                overlap_ns=each.shares.overlap_ns,
                exposed_ns=each.shares.exposed_ns,
                overlap_pct=each.shares.overlap_pct,
            )
            for each in rank.steps
            if each.step is not None
        ),
    )


def _steps(exposed: Sequence[Exposure], ranks: int) -> tuple[StepOverlap, ...]:
    """Steps in the traces of all ranks."""
    by_step: dict[int, list[Exposure]] = {}
    for each in exposed:
        by_step.setdefault(each.step, []).append(each)
    return tuple(
        StepOverlap(
            step=step,
            took_ns=round(fmean(each.took_ns for each in all_ranks)),
            exposed_transfer_ns=round(fmean(each.transfer_ns for each in all_ranks)),
            exposed_wait_ns=round(fmean(each.wait_ns for each in all_ranks)),
        )
        for step, all_ranks in sorted(by_step.items())
        if len(all_ranks) == ranks
    )


def _bucket(each: CollectiveResult) -> BucketOverlap:
    return BucketOverlap(
        step=-1 if each.step is None else each.step,
        bucket=each.bucket or 0,
        bytes=each.bytes,
        transfer_ns=each.transfer_ns,
        skew_ns=each.skew_ns,
        last_rank=each.last_rank,
        algbw_gbps=each.algbw_gbps,
        busbw_gbps=each.busbw_gbps,
        ranks=tuple(
            BucketPart(
                rank=part.rank,
                ready_ns=part.ready_ns,
                start_ns=part.start_ns,
                end_ns=part.end_ns,
                hidden_ns=part.hidden_ns,
                exposed_ns=part.exposed_ns,
                wait_ns=part.wait_ns,
            )
            for part in each.parts
        ),
    )


def traces_of_run(path: Path) -> tuple[list[RankTrace], list[str]]:
    """The traces of the last profiled attempt, with a message for each unusable trace."""
    run = RunReader(path)
    run.finish()
    profiled = [attempt for attempt in run.ordered() if attempt.collector(ProfileCollector)]
    if not profiled:
        raise TraceUnreadable(f"nothing was profiled in {path}: use `ddpcheck run --profile`")
    traces, left_out = traces_of(profiled[-1], path)
    if not traces:
        raise TraceUnreadable(f"there is no trace to show in {path}: {'; '.join(left_out)}")
    return traces, left_out
