"""Tables as plain data: views build them, the terminal, the page and Markdown render them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class CellMark(str, Enum):
    """How a cell is highlighted."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Column:
    """A column; `label` is short enough for a terminal, `title` is for reports with more room."""

    label: str
    title: str = ""
    number: bool = False
    # Only in reports with more room than a terminal.
    detail: bool = False
    # Values to copy, in a fixed-width font.
    code: bool = False

    @property
    def full_label(self) -> str:
        return self.title or self.label


@dataclass(frozen=True)
class Cell:
    """One cell, formatted; `badge` is a status word in front of the text."""

    text: str
    mark: CellMark | None = None
    badge: str = ""

    @property
    def plain(self) -> str:
        return " ".join(filter(None, (self.badge, self.text)))


@dataclass(frozen=True)
class Row:
    """One row; where not all rows fit, those with the highest weight are shown, in their order."""

    cells: tuple[Cell, ...]
    weight: float = 0.0
    # The rank or ranks it is about, for renderers that add a bar.
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table of one subject; `rows` are complete, renderers choose how many they show."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    # Units and statistic that hold for the whole table.
    subtitle: str = ""
    notes: tuple[str, ...] = ()
    # What the columns mean, for reports with more room.
    legend: str = ""
    # What the rows are, for "8 of 40 ranks are shown".
    noun: str = "rows"
    # How many there are in the job; 0: as many as there are rows.
    total: int = 0
    # The same table with one row for each rank, if rows above combine several.
    every: Table | None = None
    # Short reports leave it out.
    minor: bool = False

    @property
    def count(self) -> int:
        return max(self.total, len(self.rows))


Value = Cell | str | int | None


def row(values: Iterable[Value], weight: float = 0.0, ranks: Iterable[int] = ()) -> Row:
    """A row of cells; None means that the value is unknown."""
    return Row(tuple(map(_cell, values)), weight, tuple(ranks))


def numbers(labels: Iterable[str]) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(label, number=True) for label in labels)


def heaviest(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` rows: those with the highest weight, in the order of the table."""
    if len(rows) <= most:
        return list(rows)
    chosen = sorted(range(len(rows)), key=lambda index: (-rows[index].weight, index))[:most]
    return [rows[index] for index in sorted(chosen)]


def left_out(table: Table, shown: int) -> str:
    """What a report says about rows that it does not show; empty if it shows all."""
    if shown >= table.count:
        return ""
    return f"{shown} of {table.count} {table.noun} are shown; report.json has all of them"


def known(value: float | None, formatted: Callable[[float], str]) -> str | None:
    """The formatted value; None if it is unknown."""
    return None if value is None else formatted(value)


def _cell(value: Value) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell("-" if value is None else str(value))
