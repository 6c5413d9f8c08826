"""The course of a job over its steps, a line for each thing that is known of it: step time, gradients, memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.text import Text

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import rank_ranges, size_text, time_text
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
from ddpcheck.reports.terminal.memory import alike

if TYPE_CHECKING:
    from ddpcheck.analysis.memory.table import RankMemoryRow


Scale = tuple[float, float]

# Not the whole block: rows below each other would run into one.
_BARS = "▁▂▃▄▅▆▇"
_ASCII_BARS = "_.-=+*#"
SPARK = "cyan"
_GAP = " "
# Spreads, as shares of the largest value, from which on there is something to see, and to see from zero.
_FLAT = 0.02
_WIDE = 0.25


def spark(
    values: Sequence[float | None], width: int, ascii_only: bool = False, scale: Scale | None = None
) -> str:
    """At most `width` characters, each the largest of the values it stands for; a gap where nothing is known."""
    drawn = _gathered(values, width)
    known = [value for value in drawn if value is not None]
    if not known:
        return ""
    bars = _ASCII_BARS if ascii_only else _BARS
    low, high = scale or scale_of(known)
    return "".join(_GAP if value is None else bars[_level(value, low, high, len(bars))] for value in drawn)


def scale_of(known: Sequence[float]) -> Scale:
    """What the lowest and the highest bar stand for; equal ends: there is nothing worth seeing.

    The scale begins at zero, so that a bar twice as high is twice as much. Where values are so close together that
    nothing would show, it begins just below the least of them; where they are closer still, lines are flat.
    """
    low, high = min(known), max(known)
    spread = high - low
    if spread >= _WIDE * high and low >= 0:
        return 0.0, high
    return (low - spread / 4, high) if spread > _FLAT * abs(high) else (high, high)


def _gathered(values: Sequence[float | None], width: int) -> list[float | None]:
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    if len(finite) <= width:
        return finite
    ends = [len(finite) * place // width for place in range(width + 1)]
    return [
        max((value for value in finite[first:end] if value is not None), default=None)
        for first, end in pairwise(ends)
    ]


def _level(value: float, low: float, high: float, levels: int) -> int:
    if high <= low:
        return levels // 2 if value else 0
    return min(levels - 1, int(levels * (value - low) / (high - low)))


_INDENT, _BETWEEN = 2, 2
# On a wide terminal a longer line shows no more.
_LONGEST = 64
# Of each thing; what more ranks did is in report.json.
_MOST_ROWS = 4
_FEWEST_POINTS = 3
_HEADERS = ("", "", "", "lowest", "highest")

Values = Sequence[float | None]


@dataclass(frozen=True)
class _Row:
    what: str
    of: str
    values: Values
    spoken: Callable[[float], str]
    # At which steps, where that is not at even distances: a value then holds until the next one.
    steps: Sequence[int] = ()


def put_course(ink: ReportConsole, report: Report) -> None:
    """Only what has a course: a job of two steps has none."""
    rows = [
        row for row in (*_times(report), *_gradients(report), *_memory(report)) if _has_course(row.values)
    ]
    if not rows:
        return
    words = [_words(row, previous) for row, previous in zip(rows, [None, *rows], strict=False)]
    width = _room(ink.console.width, words)
    scales = {row.what: _scale([other for other in rows if other.what == row.what]) for row in rows}
    ascii_only = ink.console.options.ascii_only
    lines = [spark(_evenly(row, width), width, ascii_only, scales[row.what]) for row in rows]
    shown = [
        [what, of, ink.text(line, SPARK), *ends] for (what, of, *ends), line in zip(words, lines, strict=True)
    ]
    ink.gap()
    title = Text.assemble(
        ink.text("Over the steps", LABEL), ink.text("  each bar is the most of its steps", QUIET)
    )
    ink.put(title, indented(ink.columns(_HEADERS, shown)))


def _room(width: int, words: Sequence[Sequence[str]]) -> int:
    """What the words leave of a row."""
    taken = sum(max(len(row[place]) for row in [*words, ("", "", *_HEADERS[3:])]) for place in range(4))
    return max(8, min(_LONGEST, width - taken - _INDENT - _BETWEEN * len(_HEADERS)))


def _has_course(values: Values) -> bool:
    return sum(value is not None for value in values) >= _FEWEST_POINTS


def _scale(rows: Sequence[_Row]) -> Scale:
    """One for all of a kind: ranks are there to be compared."""
    return scale_of([value for row in rows for value in row.values if value is not None])


def _words(row: _Row, previous: _Row | None) -> tuple[str, str, str, str]:
    """What it is, said once, whose, and what its lowest and its highest bar stand for."""
    known = [value for value in row.values if value is not None]
    what = "" if previous is not None and previous.what == row.what else row.what
    return what, row.of, row.spoken(min(known)), row.spoken(max(known))


def _times(report: Report) -> list[_Row]:
    """Of many ranks those with the longest steps."""
    ranks = [rank for table in report.time for rank in table.ranks if rank.course_us]
    longest = sorted(ranks, key=lambda rank: -max(rank.course_us))[:_MOST_ROWS]
    return [
        _Row("step time", f"rank {rank.rank}", rank.course_us, lambda value: time_text(round(value * 1000)))
        for rank in sorted(longest, key=lambda rank: rank.rank)
    ]


def _gradients(report: Report) -> list[_Row]:
    several = len(report.gradients) > 1
    rows = []
    for history in report.gradients:
        which = f" of module {history.module}" if several else ""
        rows.append(_Row("gradient norm", f"reduced{which}", history.reduced, _short))
    return rows[:_MOST_ROWS]


def _memory(report: Report) -> list[_Row]:
    """Ranks that hold about the same share a line."""
    groups = alike(report.memory["ranks"]) if report.memory is not None else []
    return [_held(group) for group in groups[:_MOST_ROWS]]


def _held(group: Sequence[RankMemoryRow]) -> _Row:
    ranks = [row["rank"] for row in group]
    of = f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks)}"
    curve = max(group, key=lambda row: row["most"])["curve"]
    return _Row("memory", of, [value for _, value in curve], size_text, [step for step, _ in curve])


def _evenly(row: _Row, width: int) -> Values:
    """A place on the line for every step, and not for every record."""
    if not row.steps:
        return row.values
    first, last = row.steps[0], row.steps[-1]
    at = [first + (last - first) * place / (width - 1) for place in range(width)]
    return [row.values[bisect_right(row.steps, step) - 1] for step in at]


def _short(value: float) -> str:
    return f"{value:.3g}"
