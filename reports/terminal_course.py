"""The course of a job over its steps, a line for each thing that is known of it: step time, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpcheck.analysis.result import Report
from ddpcheck.analysis.units import size_text
from ddpcheck.rank_ranges import rank_ranges
from ddpcheck.reports.ink import LABEL, QUIET, Ink, indented
from ddpcheck.reports.spark import spark
from ddpcheck.reports.trace_units import time_text

# What the words and figures leave of 80 columns, and what is enough on a wider terminal.
_LINE = 34
_LONG_LINE = 64
# Of each thing; what more ranks did is in report.json.
_MOST_ROWS = 4
_FEWEST_POINTS = 3

Values = Sequence[float | None]


@dataclass(frozen=True)
class _Row:
    what: str
    of: str
    values: Values
    spoken: Callable[[float], str]


def put_course(ink: Ink, report: Report) -> None:
    """Only what has a course: a job of two steps has none."""
    rows = [
        row for row in (*_times(report), *_gradients(report), *_memory(report)) if _has_course(row.values)
    ]
    if not rows:
        return
    width = min(max(ink.console.width - 80, 0) + _LINE, _LONG_LINE)
    shown = [_drawn(row, previous, width, ink) for row, previous in zip(rows, [None, *rows], strict=False)]
    ink.gap()
    title = ink.text("Over the steps", LABEL).append("  from first to last; in each place the most", QUIET)
    ink.put(title, indented(ink.columns(["", "", "", "least", "most"], shown)))


def _has_course(values: Values) -> bool:
    return sum(value is not None for value in values) >= _FEWEST_POINTS


def _drawn(row: _Row, previous: _Row | None, width: int, ink: Ink) -> list[object]:
    known = [value for value in row.values if value is not None]
    what = "" if previous is not None and previous.what == row.what else row.what
    line = spark(row.values, width, ink.console.options.ascii_only)
    return [what, row.of, line, row.spoken(min(known)), row.spoken(max(known))]


def _times(report: Report) -> list[_Row]:
    rows = [rank for table in report.time for rank in table.ranks]
    return [
        _Row("step time", f"rank {rank.rank}", rank.course_us, lambda value: time_text(round(value * 1000)))
        for rank in rows[:_MOST_ROWS]
    ]


def _gradients(report: Report) -> list[_Row]:
    several = len(report.gradients) > 1
    rows = []
    for history in report.gradients:
        which = f" of module {history.module}" if several else ""
        rows.append(_Row("gradient norm", f"reduced{which}", history.reduced, _short))
    return rows[:_MOST_ROWS]


def _memory(report: Report) -> list[_Row]:
    """Ranks that hold the same throughout share a line."""
    rows = report.memory["ranks"] if report.memory is not None else []
    curves: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        held = [value for _, value in row["curve"]] or [0]
        curves.setdefault((size_text(min(held)), size_text(max(held))), []).append(row["rank"])
    by_rank = {row["rank"]: [value for _, value in row["curve"]] for row in rows}
    return [
        _Row("memory", _named(ranks), by_rank[ranks[0]], size_text)
        for ranks in list(curves.values())[:_MOST_ROWS]
    ]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks)}"


def _short(value: float) -> str:
    return f"{value:.3g}"
