"""Shows the results on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.corpus.results import Results, Row

POINTS = (("code", "code"), ("cause", "cause"), ("step", "step"), ("ranks", "rank"))


def show(results: Results, console: Console) -> None:
    """Print tables, then unexpected results, then totals."""
    if results.faults:
        console.print(_faults("Faults", results.faults))
    if results.variants:
        console.print(_faults("Variants of faults", results.variants))
    if results.healthy:
        console.print(_healthy(results.healthy))
    for line in misses(results):
        console.print(line, style="red", markup=False, highlight=False)
    for line in results.totals():
        console.print(line, markup=False, highlight=False)


def misses(results: Results) -> list[str]:
    """Every unexpected result."""
    lines = [
        f"{verdict.outcome.job.name}: {miss}"
        for row in [*results.faults, *results.variants, *results.healthy]
        for verdict in row.verdicts
        for miss in verdict.misses
    ]
    for program in results.programs or ():
        if program.passed != program.total:
            lines.append(f"{program.name}: {program.passed} of {program.total} {program.note}".rstrip())
    return lines


def _faults(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in (
        "bug",
        "script",
        "expected",
        "found",
        *(f"right {name}" for _, name in POINTS),
        "PyTorch says",
    ):
        table.add_column(name)
    for row in rows:
        table.add_row(
            " ".join(map(str, row.header.bugs)),
            row.header.name,
            " ".join([row.header.expect, *row.header.also]),
            row.found,
            *(mark(row.right(point)) for point, _ in POINTS),
            row.plain.kind if row.plain else "",
        )
    return table


def _healthy(rows: Sequence[Row]) -> Table:
    table = Table(title="Healthy jobs", title_justify="left", header_style="bold")
    for name in ("script", "variants", "jobs", "found at warning or above"):
        table.add_column(name)
    for row in rows:
        table.add_row(row.header.name, str(len(row.header.cases) or 1), str(len(row.verdicts)), row.found)
    return table


def mark(right: bool) -> str:
    return "yes" if right else "NO"
