"""How the time of a rank, or of a step of it, divides into communication, compute, overlap and idleness."""

from __future__ import annotations

from collections.abc import Iterable

from ddpcheck.traces.intervals import Cover, Interval
from ddpcheck.traces.rank_trace import RankTrace
from ddpcheck.traces.result import Shares, StepShares


def whole(trace: RankTrace) -> Shares:
    """The figures of the whole file."""
    return _shares(
        Cover((each.start, each.end) for each in trace.collectives),
        Cover((start, end) for start, end, _ in trace.compute),
        Cover((start, end) for start, end, _ in trace.copies),
    )


def by_step(trace: RankTrace, origin: int) -> tuple[StepShares, ...]:
    """The figures of each step; work belongs to the step that launched it, however late it ran."""
    numbers = [step.number for step in trace.steps]
    if not numbers:
        return (_step_shares(trace, None, origin),)
    return tuple(_step_shares(trace, number, origin) for number in numbers)


def _step_shares(trace: RankTrace, number: int | None, origin: int) -> StepShares:
    comm = Cover((each.start, each.end) for each in trace.collectives if each.step == number)
    compute = Cover((start, end) for start, end, step in trace.compute if step == number)
    copies = Cover((start, end) for start, end, step in trace.copies if step == number)
    starts = [cover.starts[0] for cover in (comm, compute, copies) if cover.starts]
    marked = [step.start for step in trace.steps if step.number == number]
    begin = min(starts or marked or [origin])
    return StepShares(number, begin - origin, _shares(comm, compute, copies))


def _shares(comm: Cover, compute: Cover, copies: Cover) -> Shares:
    overlap = comm.shared(compute)
    at_work = _joined(comm, compute)
    busy = _joined(at_work, copies)
    span = busy.ends[-1] - busy.starts[0] if busy.starts else 0
    return Shares(
        span_ns=span,
        comm_ns=comm.length,
        compute_ns=compute.length,
        overlap_ns=overlap,
        exposed_ns=comm.length - overlap,
        copy_ns=busy.length - at_work.length,
        idle_ns=span - busy.length,
    )


def _joined(*covers: Iterable[Interval]) -> Cover:
    return Cover(interval for cover in covers for interval in cover)
