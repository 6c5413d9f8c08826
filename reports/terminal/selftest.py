"""The page of `ddpcheck selftest` on the terminal, with colours only there, and progress while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole
from ddpcheck.selftest.model import SelftestReport, as_text, headline, page

_GOOD, _BAD = "bold green", "bold red"


def render(report: SelftestReport, console: Console) -> None:
    """Write the page; plain text where the output is no terminal."""
    if not console.is_terminal:
        console.file.write(as_text(report))
        return
    out = ReportConsole(console)
    out.put(out.text(headline(report), _BAD if report.disagreements else _GOOD))
    for title, lines in page(report):
        out.gap()
        out.put(out.text(title, _BAD if title == "Disagreements" else LABEL))
        for line in lines:
            out.put(out.text(line, _BAD if "DIFFER" in line else ""), indent=2)
    out.gap()
    out.put(out.text("Send this page back: `ddpcheck selftest --out FILE` writes it as plain text.", QUIET))


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, a line per part elsewhere."""
    if not console.is_terminal:

        def line(text: str) -> None:
            console.file.write(f"ddpcheck selftest: {text}\n")
            console.file.flush()

        yield line
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)
