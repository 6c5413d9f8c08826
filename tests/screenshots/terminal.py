"""Terminal output as an SVG that loads nothing from the network."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.reports.terminal.report import render

COLUMNS = 96


def draw_report(run: Path, title: str, picture: Path) -> None:
    console = _console()
    render(analyse_run(run), console)
    _save(console, title, picture)


def draw_text(text: str, title: str, picture: Path) -> None:
    console = _console()
    console.print(Text(text.rstrip()))
    _save(console, title, picture)


def _console() -> Console:
    return Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )


def _save(console: Console, title: str, picture: Path) -> None:
    drawn = console.export_svg(title=title)
    # The image must not load a font from the network: any monospaced font will do.
    drawn = re.sub(r"@font-face\s*{.*?}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    picture.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", encoding="utf-8")
