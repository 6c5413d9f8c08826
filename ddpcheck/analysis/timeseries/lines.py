"""The time of each step and its parts, and how much of the waiting was communication itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.timeseries.loss import LossSeries
from ddpcheck.analysis.timeseries.model import GradientHistory, NamedSeries, SeriesKind
from ddpcheck.analysis.timeseries.series import THINNING_MOST_POINTS, Series, line, there
from ddpcheck.analysis.timing.rank_series import StepTimeSeries
from ddpcheck.formatting import name_ranks


def job_gradients(histories: Sequence[GradientHistory], room: int) -> tuple[NamedSeries, ...]:
    """After it all ranks hold the same, and each has told a share of it."""
    return there(
        line(figure, history.steps, values, room, _gradient_lines_of(history, histories))
        for history in histories
        for figure, values in (
            (SeriesKind.NORM_AFTER, history.reduced),
            (SeriesKind.OFF_MEAN, history.off_mean),
        )
    )


def rank_gradients(histories: Sequence[GradientHistory], rank: int, room: int) -> tuple[NamedSeries, ...]:
    return there(
        line(
            SeriesKind.NORM_BEFORE,
            history.steps,
            history.local[str(rank)],
            room,
            _gradient_lines_of(history, histories),
        )
        for history in histories
        if str(rank) in history.local
    )


def _gradient_lines_of(history: GradientHistory, histories: Sequence[GradientHistory]) -> str:
    return f"module {history.module}" if len(histories) > 1 else ""


def rank_loss(attempt: Attempt, rank: int, room: int) -> tuple[NamedSeries, ...]:
    mine = {optimizer: book for (of, optimizer), book in attempt.losses.items() if of == rank}
    return there(
        line(SeriesKind.LOSS, book.steps, book.values, room, _label(attempt, optimizer))
        for optimizer, book in sorted(mine.items())
    )


def job_loss(attempt: Attempt, room: int) -> tuple[NamedSeries, ...]:
    """At steps of which every rank has told."""
    found: list[NamedSeries | None] = []
    for optimizer in sorted({optimizer for _, optimizer in attempt.losses}):
        books = [book for (_, of), book in attempt.losses.items() if of == optimizer]
        if len(books) == len(attempt.ranks):
            means = _means(books)
            found.append(
                line(SeriesKind.LOSS, list(means), list(means.values()), room, _label(attempt, optimizer))
            )
    return there(found)


def _means(books: list[LossSeries]) -> dict[int, float]:
    by_rank = [dict(zip(book.steps, book.values, strict=True)) for book in books]
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    return {step: fmean(values[step] for values in by_rank) for step in common}


def _label(attempt: Attempt, optimizer: int) -> str:
    """Nothing where one optimizer alone has a loss."""
    return f"optimizer {optimizer}" if len({of for _, of in attempt.losses}) > 1 else ""


def rank_memory(attempt: Attempt, rank: int, room: int) -> tuple[NamedSeries, ...]:
    """Of many steps those at which something changed: in between, and to the end, it stayed as it was, by a MiB."""
    memory = attempt.memory.ranks.get(rank)
    if memory is None:
        return ()
    last = attempt.steps(rank) - 1
    return there(
        _line(figure, series, last, room)
        for figure, series in ((SeriesKind.MEMORY, memory.after), (SeriesKind.MEMORY_HIGH, memory.high))
    )


def _line(figure: SeriesKind, series: Series, last: int, room: int) -> NamedSeries | None:
    steps, values = list(series.steps), list(series.values)
    if steps and steps[-1] < last:
        steps.append(last)
        values.append(values[-1])
    return line(figure, steps, values, room)


def job_overlap(overlap: Overlap | None) -> tuple[NamedSeries, ...]:
    """Means over ranks."""
    if overlap is None:
        return ()
    steps = [each.step for each in overlap.steps]
    return there(
        line(figure, steps, [nanoseconds / 1000 for nanoseconds in values], THINNING_MOST_POINTS)
        for figure, values in (
            (SeriesKind.PROFILED_TRANSFER, [each.exposed_transfer_ns for each in overlap.steps]),
            (SeriesKind.PROFILED_WAIT, [each.exposed_wait_ns for each in overlap.steps]),
        )
    )


def rank_overlap(overlap: Overlap | None, rank: int) -> tuple[NamedSeries, ...]:
    mine = next((each for each in overlap.ranks if each.rank == rank), None) if overlap else None
    if mine is None:
        return ()
    steps = [each.step for each in mine.by_step]
    exposed = [each.exposed_ns / 1000 for each in mine.by_step]
    # Without communication there is nothing to hide.
    hidden = [each.overlap_pct if each.comm_ns else None for each in mine.by_step]
    return there(
        [
            line(SeriesKind.OVERLAP, steps, hidden, THINNING_MOST_POINTS),
            line(SeriesKind.PROFILED_EXPOSED, steps, exposed, THINNING_MOST_POINTS),
        ]
    )


_COLUMNS = {
    "total": SeriesKind.STEP,
    "data": SeriesKind.DATA,
    "forward": SeriesKind.FORWARD,
    "backward": SeriesKind.BACKWARD,
    "optimizer": SeriesKind.OPTIMIZER,
    "other": SeriesKind.OTHER,
    "wait": SeriesKind.WAIT,
    "watching": SeriesKind.WATCHING,
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


def job_time(shortest: Shortest, room: int) -> tuple[NamedSeries, ...]:
    return there(
        line(SeriesKind.EXPOSED, list(waits), list(waits.values()), room, _of(group, shortest))
        for group, waits in shortest.items()
    )


def rank_time(clock: StepTimeSeries, rank: int, shortest: Shortest, room: int) -> tuple[NamedSeries, ...]:
    parts = [line(figure, clock.steps, clock.columns[name], room) for name, figure in _COLUMNS.items()]
    for group, waits in shortest.items():
        if rank in group:
            mine = [
                (step, wait - waits[step])
                for step, wait in zip(clock.steps, clock.columns["wait"], strict=True)
                if step in waits
            ]
            steps, values = [step for step, _ in mine], [value for _, value in mine]
            parts.append(line(SeriesKind.FOR_OTHERS, steps, values, room, _of(group, shortest)))
    return there(parts)


def _shortest(clocks: Sequence[StepTimeSeries]) -> dict[int, int]:
    by_rank = [dict(zip(clock.steps, clock.columns["wait"], strict=True)) for clock in clocks]
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    return {step: min(waits[step] for waits in by_rank) for step in common}


def _of(group: tuple[int, ...], shortest: Shortest) -> str:
    return name_ranks(group) if len(shortest) > 1 else ""
