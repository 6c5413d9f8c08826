"""The time of each step and its parts, and how much of the waiting was communication itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.course.thinning import line, there
from ddpcheck.analysis.timeseries.model import Figure, Line
from ddpcheck.analysis.timing.rank_series import RankClock
from ddpcheck.formatting import name_ranks

_COLUMNS = {
    "total": Figure.STEP,
    "data": Figure.DATA,
    "forward": Figure.FORWARD,
    "backward": Figure.BACKWARD,
    "optimizer": Figure.OPTIMIZER,
    "other": Figure.OTHER,
    "wait": Figure.WAIT,
    "watching": Figure.WATCHING,
}
Shortest = Mapping[tuple[int, ...], Mapping[int, int]]


def shortest_waits(attempt: Attempt) -> Shortest:
    """By group of ranks that synchronise, and step: who came last had nobody to wait for."""
    groups = dict.fromkeys(module[0] for module in attempt.modules())
    return {
        group: _shortest([attempt.clocks[rank] for rank in group])
        for group in groups
        if len(group) > 1 and all(rank in attempt.clocks for rank in group)
    }


def job_time(shortest: Shortest, room: int) -> tuple[Line, ...]:
    return there(
        line(Figure.EXPOSED, list(waits), list(waits.values()), room, _of(group, shortest))
        for group, waits in shortest.items()
    )


def rank_time(clock: RankClock, rank: int, shortest: Shortest, room: int) -> tuple[Line, ...]:
    parts = [line(figure, clock.steps, clock.columns[name], room) for name, figure in _COLUMNS.items()]
    for group, waits in shortest.items():
        if rank in group:
            mine = [
                (step, wait - waits[step])
                for step, wait in zip(clock.steps, clock.columns["wait"], strict=True)
                if step in waits
            ]
            steps, values = [step for step, _ in mine], [value for _, value in mine]
            parts.append(line(Figure.FOR_OTHERS, steps, values, room, _of(group, shortest)))
    return there(parts)


def _shortest(clocks: Sequence[RankClock]) -> dict[int, int]:
    by_rank = [dict(zip(clock.steps, clock.columns["wait"], strict=True)) for clock in clocks]
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    return {step: min(waits[step] for waits in by_rank) for step in common}


def _of(group: tuple[int, ...], shortest: Shortest) -> str:
    return name_ranks(group) if len(shortest) > 1 else ""
