"""What a rank's memory held after each step, and at its most."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.course.thinning import line, there
from ddpcheck.analysis.timeseries.model import Figure, Line
from ddpcheck.analysis.timeseries.series import Series


def rank_memory(attempt: Attempt, rank: int, room: int) -> tuple[Line, ...]:
    """Of many steps those at which something changed: in between, and to the end, it stayed as it was, by a MiB."""
    memory = attempt.memory.ranks.get(rank)
    if memory is None:
        return ()
    last = attempt.steps(rank) - 1
    return there(
        _line(figure, series, last, room)
        for figure, series in ((Figure.MEMORY, memory.after), (Figure.MEMORY_HIGH, memory.high))
    )


def _line(figure: Figure, series: Series, last: int, room: int) -> Line | None:
    steps, values = list(series.steps), list(series.values)
    if steps and steps[-1] < last:
        steps.append(last)
        values.append(values[-1])
    return line(figure, steps, values, room)
