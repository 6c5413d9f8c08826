"""The console of the terminal reports: safe text, tables without boxes, no trailing blanks, ASCII where needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table as RichTable
from rich.text import Text

from ddpcheck.reports.safe_text import safe_ascii, safe_line
from ddpcheck.reports.views.table import Cell, CellMark, Column, Row, Table, heaviest, left_out

LABEL = "bold"
QUIET = "dim"
MARK_STYLES = {CellMark.OK: "green", CellMark.WARNING: "yellow", CellMark.ERROR: "bold red"}
_MOST_ROWS = 8

Bar = Callable[[Row], Text]


@dataclass(frozen=True)
class ReportConsole:
    """Prints the parts of a report on one console."""

    console: Console

    def text(self, value: object, style: str = "") -> Text:
        """Safe text of one or more lines; long words are folded."""
        lines = str(value).split("\n")
        return Text("\n".join(self.line(line) for line in lines), style=style, overflow="fold")

    def line(self, value: object) -> str:
        """One line of safe text."""
        return safe_ascii(value) if self.console.options.ascii_only else safe_line(value)

    def columns(self, headers: Iterable[str], rows: Iterable[Iterable[object]]) -> RichTable:
        """A table without a box, which reads the same in a log file."""
        return self._grid([Column(header) for header in headers], rows)

    def grid(
        self, table: Table, rows: Iterable[Row], bar: Bar | None = None, bar_label: str = ""
    ) -> RichTable:
        """The rows of a view, without the columns that need more room; `bar` draws a last column."""
        kept = [index for index, column in enumerate(table.columns) if not column.detail]
        cells = [
            [*(self._cell(row.cells[index]) for index in kept), *([bar(row)] if bar else [])] for row in rows
        ]
        columns = [table.columns[index] for index in kept] + ([Column(bar_label)] if bar else [])
        return self._grid(columns, cells)

    def table(
        self,
        table: Table | None,
        most: int = _MOST_ROWS,
        bar: Bar | None = None,
        bar_label: str = "",
        bar_legend: Text | None = None,
    ) -> None:
        """Print a view: title, at most `most` rows, what is left out, and notes. Nothing for None."""
        if table is None or table.minor:
            return
        shown = heaviest(table.rows, most)
        title = self.text(table.title, LABEL)
        if table.subtitle:
            title.append(self.text(f"  {table.subtitle}", QUIET))
        self.gap()
        self.put(title)
        if shown:
            self.put(self.grid(table, shown, bar, bar_label), indent=2)
        if shown and bar_legend is not None:
            self.put(bar_legend, indent=2)
        rest = left_out(table, len(shown))
        for note in (*([rest] if rest else []), *table.notes):
            self.put(self.text(note), indent=2)

    def labelled(self, rows: Iterable[tuple[str, RenderableType]], style: str = LABEL) -> RichTable:
        """Lines of `label  content`; the content wraps under itself."""
        table = RichTable.grid(padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for label, content in rows:
            table.add_row(self.text(label, style), content)
        return table

    def put(self, *blocks: RenderableType, indent: int = 0) -> None:
        """Print without the trailing blanks that rich adds, which log files would keep."""
        padded = Padding(Group(*blocks), (0, 0, 0, indent), expand=False)
        for line in self.console.render_lines(padded, pad=False):
            self.console.print(Segments([*_trimmed(line), Segment.line()]), end="", highlight=False)

    def gap(self) -> None:
        """Print an empty line."""
        self.console.print()

    def _grid(self, columns: list[Column], rows: Iterable[Iterable[object]]) -> RichTable:
        grid = RichTable(
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
            show_header=any(column.label for column in columns),
        )
        for column in columns:
            justify = "right" if column.number else "left"
            grid.add_column(self.text(column.label, QUIET), overflow="fold", justify=justify)  # type: ignore[arg-type]
        for row in rows:
            grid.add_row(*(cell if isinstance(cell, Text) else self.text(cell) for cell in row))
        return grid

    def _cell(self, cell: Cell) -> Text:
        return self.text(cell.plain, "" if cell.mark is None else MARK_STYLES[cell.mark])


def indented(block: RenderableType, by: int = 2) -> Padding:
    return Padding(block, (0, 0, 0, by), expand=False)


def _trimmed(line: list[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style, kept[-1].control)
    return kept
