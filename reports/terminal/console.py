"""How the terminal report puts text down: nothing is markup, nothing trails, everything can be ASCII."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from ddpcheck.reports.safe_text import safe_ascii, safe_line

LABEL = "bold"
QUIET = "dim"


@dataclass(frozen=True)
class ReportConsole:
    """Writes for one console."""

    console: Console

    def text(self, value: object, style: str = "") -> Text:
        """Several lines of safe text; long words fold instead of running off the edge."""
        lines = str(value).split("\n")
        return Text("\n".join(self.line(line) for line in lines), style=style, overflow="fold")

    def line(self, value: object) -> str:
        """One line of safe text."""
        return safe_ascii(value) if self.console.options.ascii_only else safe_line(value)

    def columns(self, headers: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
        """A table without a box, which reads the same in a log file."""
        titles = list(headers)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(titles))
        for title in titles:
            table.add_column(self.text(title, QUIET), overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else self.text(cell) for cell in row))
        return table

    def labelled(self, rows: Iterable[tuple[str, RenderableType]]) -> Table:
        """Lines of `label  content`, the content wrapped under itself."""
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for label, content in rows:
            table.add_row(self.text(label, LABEL), content)
        return table

    def put(self, *blocks: RenderableType, indent: int = 0) -> None:
        """Print without the trailing blanks that rich pads with and log files keep."""
        padded = Padding(Group(*blocks), (0, 0, 0, indent), expand=False)
        for line in self.console.render_lines(padded, pad=False):
            self.console.print(Segments([*_trimmed(line), Segment.line()]), end="", highlight=False)

    def gap(self) -> None:
        self.console.print()


def indented(block: RenderableType, by: int = 2) -> Padding:
    return Padding(block, (0, 0, 0, by), expand=False)


def _trimmed(line: list[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style, kept[-1].control)
    return kept
