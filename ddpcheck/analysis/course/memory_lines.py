"""What a rank's memory held after each step, and at its most."""

from __future__ import annotations

from ddpcheck.analysis.attempt import Attempt
from ddpcheck.analysis.course.result import Figure, Line
from ddpcheck.analysis.course.thinning import line, there


def rank_memory(attempt: Attempt, rank: int, room: int) -> tuple[Line, ...]:
    """Of many steps those at which something changed: in between it stayed as it was, by a MiB."""
    memory = attempt.memory.ranks.get(rank)
    if memory is None:
        return ()
    return there(
        line(figure, series.steps, series.values, room)
        for figure, series in ((Figure.MEMORY, memory.after), (Figure.MEMORY_HIGH, memory.high))
    )
