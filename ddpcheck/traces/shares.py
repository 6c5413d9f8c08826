"""How the time of a rank, or of a step of it, divides into communication, compute, overlap and idleness."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ddpcheck.traces.intervals import Cover, Interval
from ddpcheck.traces.model import Shares, StepShares
from ddpcheck.traces.rank_trace import RankTrace


def whole(trace: RankTrace, compute: Cover) -> Shares:
    """The figures of the whole file; what its compute covers is known already."""
    comm = Cover([(each.start, each.end) for each in trace.collectives])
    return _shares(comm, compute, Cover([(start, end) for start, end, _ in trace.copies]))


def by_step(trace: RankTrace, origin: int) -> tuple[StepShares, ...]:
    """The figures of each step; work belongs to the step that launched it, however late it ran."""
    comm = _by_number((each.step, each.start, each.end) for each in trace.collectives)
    compute = _by_number((step, start, end) for start, end, step in trace.compute)
    copies = _by_number((step, start, end) for start, end, step in trace.copies)
    marked: dict[int | None, int] = {step.number: step.start for step in reversed(trace.steps)}
    return tuple(
        _step(number, begin, origin, comm[number], compute[number], copies[number])
        for number, begin in sorted(marked.items(), key=lambda item: item[1]) or [(None, origin)]
    )


def _by_number(work: Iterable[tuple[int | None, int, int]]) -> defaultdict[int | None, list[Interval]]:
    found: defaultdict[int | None, list[Interval]] = defaultdict(list)
    for step, start, end in work:
        found[step].append((start, end))
    return found


def _step(number: int | None, begin: int, origin: int, *work: Iterable[Interval]) -> StepShares:
    comm, compute, copies = map(Cover, work)
    # On a GPU a step begins when its first work runs, which may be long after the processor began it.
    starts = [cover.starts[0] for cover in (comm, compute, copies) if cover.starts]
    return StepShares(number, min(starts, default=begin) - origin, _shares(comm, compute, copies))


def _shares(comm: Cover, compute: Cover, copies: Cover) -> Shares:
    overlap = comm.shared(compute)
    copies_alone = copies.without(comm).without(compute).length
    busy = comm.length + compute.length - overlap + copies_alone
    covers = [cover for cover in (comm, compute, copies) if cover.starts]
    span = max(cover.ends[-1] for cover in covers) - min(cover.starts[0] for cover in covers) if covers else 0
    return Shares(
        span_ns=span,
        comm_ns=comm.length,
        compute_ns=compute.length,
        overlap_ns=overlap,
        exposed_ns=comm.length - overlap,
        copy_ns=copies_alone,
        idle_ns=span - busy,
    )
