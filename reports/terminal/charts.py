"""Charts on the terminal: stacked bars of a step, and sparklines of a quantity over the steps of a job."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from ddpcheck.analysis.report import Report
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
from ddpcheck.reports.views.timeseries import SeriesView, Values, job_series
from ddpcheck.reports.views.timing import PHASES
from ddpcheck.traces.model import Shares

# Letters distinguish the parts where there is no colour.
_SHARES = (
    ("compute", "compute_alone_ns", "#", "green"),
    ("hidden comm", "overlap_ns", "=", "cyan"),
    ("exposed comm", "exposed_ns", "!", "red"),
    ("copies", "copy_ns", "c", "blue"),
    ("idle", "idle_ns", ".", "dim"),
)
_PHASE_LETTERS = {
    "data": ("d", "yellow"),
    "forward": ("f", "green"),
    "backward": ("b", "cyan"),
    "optimizer": ("o", "blue"),
    "other": (".", "dim"),
    "wait": ("!", "red"),
}


def overlap_bar(shares: Shares, longest_ns: int, width: int) -> Text:
    """All ranks share one scale: `longest_ns` fills `width`."""
    amounts = [getattr(shares, attribute) for _, attribute, _, _ in _SHARES]
    return _bar(amounts, [(letter, style) for _, _, letter, style in _SHARES], longest_ns, width)


def overlap_legend() -> Text:
    """The meaning of the letters."""
    legend = Text()
    for number, (name, _, letter, style) in enumerate(_SHARES):
        legend.append("   " if number else "")
        legend.append(letter, style=style)
        legend.append(f" {name}")
    return legend


def step_bar(phases: Mapping[str, float], longest: float, width: int) -> Text:
    """One rank's step by phase; `longest` fills `width`."""
    amounts = [phases.get(phase, 0) for phase, _, _ in PHASES]
    return _bar(amounts, [_PHASE_LETTERS[phase] for phase, _, _ in PHASES], longest, width)


def step_legend(all_phases: bool = True) -> str:
    """The meaning of the letters: `data fwd bwd opt .other !wait`; without `all_phases` those that differ."""
    labels = [(_PHASE_LETTERS[phase][0], label) for phase, label, _ in PHASES]
    return " ".join(
        label if letter == label[0] else f"{letter}{label}"
        for letter, label in labels
        if all_phases or letter != label[0]
    )


def cell_counts(amounts: Sequence[float], longest: float, width: int) -> list[int]:
    """Cells for each amount; rounding the ends instead of the lengths keeps their sum right."""
    ends, total = [], 0.0
    for amount in amounts:
        total += amount
        ends.append(round(width * total / longest) if longest else 0)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _bar(amounts: Sequence[float], parts: Sequence[tuple[str, str]], longest: float, width: int) -> Text:
    bar = Text(no_wrap=True)
    for cells, (letter, style) in zip(cell_counts(amounts, longest, width), parts, strict=True):
        bar.append(letter * cells, style=style)
    return bar


Scale = tuple[float, float]

# Without the full block: rows below each other would touch.
_BARS = "▁▂▃▄▅▆▇"
_ASCII_BARS = "_.-=+*#"
STYLE = "cyan"
# Spreads, as shares of the largest value: below _FLAT a line is flat, from _WIDE on the scale begins at zero.
_FLAT = 0.02
_WIDE = 0.25

_INDENT, _BETWEEN = 2, 2
# A longer line on a wide terminal shows no more.
_LONGEST, _SHORTEST = 64, 8
_HEADERS = ("", "", "", "minimum", "maximum")


def sparkline(
    values: Sequence[float | None], width: int, ascii_only: bool = False, scale: Scale | None = None
) -> str:
    """At most `width` bars, each the maximum of its values; a blank where nothing is known."""
    downsampled = _downsampled(values, width)
    known = [value for value in downsampled if value is not None]
    if not known:
        return ""
    bars = _ASCII_BARS if ascii_only else _BARS
    low, high = scale or scale_of(known)
    return "".join(
        " " if value is None else bars[_level(value, low, high, len(bars))] for value in downsampled
    )


def scale_of(known: Sequence[float]) -> Scale:
    """The values of the lowest and the highest bar; equal ends mean a flat line.

    The scale begins at zero, so that a bar of twice the height is twice the value. Where values are so close that
    nothing would be visible, it begins just below the minimum; where they are closer still, the line is flat.
    """
    low, high = min(known), max(known)
    spread = high - low
    if spread >= _WIDE * high and low >= 0:
        return 0.0, high
    return (low - spread / 4, high) if spread > _FLAT * abs(high) else (high, high)


def print_series(console: ReportConsole, report: Report) -> None:
    """One line for each series; nothing for a job that is too short."""
    series = job_series(report)
    if not series:
        return
    labels = [_labels(each, previous) for each, previous in zip(series, [None, *series], strict=False)]
    width = _line_width(console.console.width, labels)
    scales = {each.quantity: _common_scale(each.quantity, series) for each in series}
    ascii_only = console.console.options.ascii_only
    rows = []
    for each, (quantity, owner, low, high) in zip(series, labels, strict=True):
        line = sparkline(_evenly_spaced(each, width), width, ascii_only, scales[each.quantity])
        rows.append([quantity, owner, console.text(line, STYLE), low, high])
    title = Text.assemble(
        console.text("Over the steps", LABEL), console.text("  each bar is the maximum over its steps", QUIET)
    )
    console.gap()
    console.put(title, indented(console.columns(_HEADERS, rows)))


def _downsampled(values: Sequence[float | None], width: int) -> list[float | None]:
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    if len(finite) <= width:
        return finite
    ends = [len(finite) * index // width for index in range(width + 1)]
    return [
        max((value for value in finite[first:end] if value is not None), default=None)
        for first, end in pairwise(ends)
    ]


def _level(value: float, low: float, high: float, levels: int) -> int:
    if high <= low:
        return levels // 2 if value else 0
    return min(levels - 1, int(levels * (value - low) / (high - low)))


def _line_width(width: int, labels: Sequence[Sequence[str]]) -> int:
    """What the other columns leave."""
    texts = [*labels, ("", "", *_HEADERS[3:])]
    taken = sum(max(len(row[index]) for row in texts) for index in range(4))
    return max(_SHORTEST, min(_LONGEST, width - taken - _INDENT - _BETWEEN * len(_HEADERS)))


def _common_scale(quantity: str, series: Sequence[SeriesView]) -> Scale:
    """One scale for all ranks, so that they can be compared."""
    return scale_of(
        [value for each in series if each.quantity == quantity for value in each.values if value is not None]
    )


def _labels(series: SeriesView, previous: SeriesView | None) -> tuple[str, str, str, str]:
    """The quantity, only where it changes; the owner, the minimum and the maximum."""
    known = [value for value in series.values if value is not None]
    repeated = previous is not None and previous.quantity == series.quantity
    quantity = "" if repeated else series.quantity
    return quantity, series.owner, series.formatted(min(known)), series.formatted(max(known))


def _evenly_spaced(series: SeriesView, width: int) -> Values:
    """A value for each bar: by step, not by record."""
    if not series.steps:
        return series.values
    first, last = series.steps[0], series.steps[-1]
    at = [first + (last - first) * index / (width - 1) for index in range(width)]
    return [series.values[bisect_right(series.steps, step) - 1] for step in at]
