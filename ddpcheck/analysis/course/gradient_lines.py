"""Norms of gradients before and after the AllReduce, and how far the result is from the mean."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.course.thinning import line, there
from ddpcheck.analysis.history.result import GradientHistory
from ddpcheck.analysis.timeseries.model import Figure, Line


def job_gradients(histories: Sequence[GradientHistory], room: int) -> tuple[Line, ...]:
    """After it all ranks hold the same, and each has told a share of it."""
    return there(
        line(figure, history.steps, values, room, _of(history, histories))
        for history in histories
        for figure, values in ((Figure.NORM_AFTER, history.reduced), (Figure.OFF_MEAN, history.off_mean))
    )


def rank_gradients(histories: Sequence[GradientHistory], rank: int, room: int) -> tuple[Line, ...]:
    return there(
        line(Figure.NORM_BEFORE, history.steps, history.local[str(rank)], room, _of(history, histories))
        for history in histories
        if str(rank) in history.local
    )


def _of(history: GradientHistory, histories: Sequence[GradientHistory]) -> str:
    return f"module {history.module}" if len(histories) > 1 else ""
