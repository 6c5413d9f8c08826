"""Speed and memory of two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.diff.speed import INTERVALS, Measured, SpeedFigure, SpeedOutcome, SpeedUnit
from ddpcheck.formatting import megabits_text, size_text, time_text
from ddpcheck.reports.views.table import Cell, CellMark, Column, Table, numbers, row

_MARKS = {SpeedOutcome.BETTER: CellMark.OK, SpeedOutcome.WORSE: CellMark.ERROR}


def speed_table(speed: Sequence[SpeedFigure]) -> Table | None:
    """None if neither run measured anything."""
    if not speed:
        return None
    columns = (
        Column("quantity"),
        *numbers(("run A", "run B", "change", "noise A", "noise B")),
        Column("B is"),
    )
    rows = tuple(
        row(
            [
                figure.what,
                _value(figure.unit, figure.a),
                _value(figure.unit, figure.b),
                None if figure.change is None else f"{100 * figure.change:+.1f} %",
                _noise(figure.a),
                _noise(figure.b),
                Cell(figure.outcome.value, _MARKS.get(figure.outcome)),
            ]
        )
        for figure in speed
    )
    return Table(
        "Speed",
        columns,
        rows,
        subtitle="medians over steps, without ddpcheck's own time",
        notes=(
            f"Noise: range of the medians of {INTERVALS} intervals. B differs if the ranges do not overlap.",
        ),
        noun="quantities",
    )


def _value(unit: SpeedUnit, measured: Measured | None) -> str | None:
    if measured is None:
        return None
    if unit is SpeedUnit.BYTES:
        return size_text(round(measured.value))
    if unit is SpeedUnit.BYTES_PER_SECOND:
        return megabits_text(measured.value)
    return time_text(round(measured.value * 1000))


def _noise(measured: Measured | None) -> str | None:
    if measured is None or not measured.is_range or measured.value <= 0:
        return None
    below, above = measured.low / measured.value - 1, measured.high / measured.value - 1
    return f"{100 * below:+.0f}/{100 * above:+.0f} %"
