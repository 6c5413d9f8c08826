"""The loss of each rank, and its mean over ranks: what a job of DDP descends on."""

from __future__ import annotations

from statistics import fmean

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.course.thinning import line, there
from ddpcheck.analysis.timeseries.loss import LossBook
from ddpcheck.analysis.timeseries.model import Figure, Line


def rank_loss(attempt: Attempt, rank: int, room: int) -> tuple[Line, ...]:
    mine = {optimizer: book for (of, optimizer), book in attempt.losses.items() if of == rank}
    return there(
        line(Figure.LOSS, book.steps, book.values, room, _label(attempt, optimizer))
        for optimizer, book in sorted(mine.items())
    )


def job_loss(attempt: Attempt, room: int) -> tuple[Line, ...]:
    """At steps of which every rank has told."""
    found: list[Line | None] = []
    for optimizer in sorted({optimizer for _, optimizer in attempt.losses}):
        books = [book for (_, of), book in attempt.losses.items() if of == optimizer]
        if len(books) == len(attempt.ranks):
            means = _means(books)
            found.append(
                line(Figure.LOSS, list(means), list(means.values()), room, _label(attempt, optimizer))
            )
    return there(found)


def _means(books: list[LossBook]) -> dict[int, float]:
    by_rank = [dict(zip(book.steps, book.values, strict=True)) for book in books]
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    return {step: fmean(values[step] for values in by_rank) for step in common}


def _label(attempt: Attempt, optimizer: int) -> str:
    """Nothing where one optimizer alone has a loss."""
    return f"optimizer {optimizer}" if len({of for _, of in attempt.losses}) > 1 else ""
