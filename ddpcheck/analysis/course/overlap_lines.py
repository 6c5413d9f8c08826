"""Overlap and exposed communication of the profiled steps."""

from __future__ import annotations

from ddpcheck.analysis.course.thinning import MOST_POINTS, line, there
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.timeseries.model import Figure, Line


def job_overlap(overlap: Overlap | None) -> tuple[Line, ...]:
    """Means over ranks."""
    if overlap is None:
        return ()
    steps = [each.step for each in overlap.steps]
    return there(
        line(figure, steps, [nanoseconds / 1000 for nanoseconds in values], MOST_POINTS)
        for figure, values in (
            (Figure.PROFILED_TRANSFER, [each.exposed_transfer_ns for each in overlap.steps]),
            (Figure.PROFILED_WAIT, [each.exposed_wait_ns for each in overlap.steps]),
        )
    )


def rank_overlap(overlap: Overlap | None, rank: int) -> tuple[Line, ...]:
    mine = next((each for each in overlap.ranks if each.rank == rank), None) if overlap else None
    if mine is None:
        return ()
    steps = [each.step for each in mine.by_step]
    exposed = [each.exposed_ns / 1000 for each in mine.by_step]
    # Without communication there is nothing to hide.
    hidden = [each.overlap_pct if each.comm_ns else None for each in mine.by_step]
    return there(
        [
            line(Figure.OVERLAP, steps, hidden, MOST_POINTS),
            line(Figure.PROFILED_EXPOSED, steps, exposed, MOST_POINTS),
        ]
    )
