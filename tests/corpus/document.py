"""Renders the results as docs/corpus.md."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.corpus.plain import WAIT_SECONDS
from tests.corpus.results import Program, Results, Row
from tests.corpus.table import POINTS, mark, misses

_TOP = """\
<!-- Made by `make corpus`. Changes go into examples/faults, examples/healthy or tests/corpus. -->
# The corpus

Bugs from real DDP jobs, each rewritten as a small script, and healthy jobs of many kinds. `make corpus` runs all of
them under `ddpcheck run` and compares the findings with the docstring of each script. For a fault, the docstring gives
the code, cause, first step, stage, parameter and ranks, and no other finding at warning or above may appear. For a
healthy job, no finding at warning or above may appear. `make corpus` fails on any difference. This page shows its last
result.
"""
_PLAIN = f"""\
The columns "plain" and "INFO" show what PyTorch reports for the same script without ddpcheck, by default and with
`TORCH_DISTRIBUTED_DEBUG=INFO`: nothing, a warning, an error, or a hang (running after {WAIT_SECONDS:.0f} seconds).
The messages are quoted below the table.
"""


def render(results: Results) -> str:
    """The whole page, without times and durations, so that only results change it."""
    parts = [_TOP, _versions(), "## Totals\n", _list(results.totals())]
    unexpected = misses(results)
    if unexpected:
        parts += ["## Not as expected\n", _list(unexpected)]
    if results.faults:
        parts += ["## Faults\n", _PLAIN, _faults(results.faults), _quotes(results.faults)]
    if results.variants:
        parts += ["## Variants of faults\n", _variants(results.variants)]
    parts += ["## Healthy jobs\n", _healthy(results.healthy)]
    if results.programs is not None:
        parts += ["## Real programs\n", _programs(results.programs)]
    return "\n".join(part for part in parts if part)


def update(page: str, results: Results, scripts: Iterable[Path]) -> str:
    """The page with the rows of these results in place of its own, and without rows of scripts that are gone."""
    existing = {path.name for path in scripts}
    for title, table in (
        ("## Faults", _faults(results.faults)),
        ("## Variants of faults", _variants(results.variants)),
        ("## Healthy jobs", _healthy(results.healthy)),
    ):
        before, heading, rest = page.partition(f"{title}\n")
        section, following, after = rest.partition("\n## ")
        rows = {_script(line): line for line in section.splitlines() if _script(line)}
        rows |= {_script(line): line for line in table.splitlines() if _script(line)}
        kept = sorted((_order(line), line) for name, line in rows.items() if name in existing)
        lines = [line for line in section.splitlines() if not _script(line)]
        first = next((number for number, line in enumerate(lines, 1) if line.startswith("|---")), len(lines))
        lines[first:first] = [line for _, line in kept]
        page = before + heading + "\n".join(lines) + "\n" * section.endswith("\n") + following + after
    return page


def _script(row: str) -> str:
    """The file of a row; empty for any other line."""
    found = re.search(r"\]\(\.\./examples/(?:[a-z]+/)+(\w+\.py)\)", row) if row.startswith("| ") else None
    return found[1] if found else ""


def _order(row: str) -> tuple[int, str]:
    """As in a whole run: by the number of the bug where there is one, then by name."""
    number = re.match(r"\| (\d+)", row)
    return int(number[1]) if number else 0, _script(row)


def _versions() -> str:
    return f"With torch {version('torch')} on Python {platform.python_version()}, on CPU with gloo.\n"


def _faults(rows: Sequence[Row]) -> str:
    points = [name for _, name in POINTS]
    return _table(
        [
            "bug",
            "seen in",
            "script",
            "expected",
            "found",
            *(f"right {name}" for name in points),
            "plain",
            "INFO",
        ],
        [
            [
                " ".join(map(str, row.header.bugs)),
                row.header.seen_in,
                _link(row),
                _expected(row),
                row.found,
                *(mark(row.right(point)) for point, _ in POINTS),
                row.plain.kind if row.plain else "",
                row.detailed.kind if row.detailed else "",
            ]
            for row in rows
        ],
    )


def _quotes(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        plain, detailed = row.plain, row.detailed
        if plain and plain.quote:
            lines.append(f"`{row.header.name}`: {plain.kind}, “{plain.quote}”")
        if detailed and detailed.quote and detailed != plain:
            lines.append(f"`{row.header.name}` with INFO: {detailed.kind}, “{detailed.quote}”")
    return _list(lines) if lines else ""


def _variants(rows: Sequence[Row]) -> str:
    return _table(
        ["script", "variant of", "ranks", "expected", "found", *(f"right {name}" for _, name in POINTS)],
        [
            [
                _link(row, "variants/"),
                row.header.variant_of,
                " ".join(map(str, row.header.ranks)),
                _expected(row),
                row.found,
                *(mark(row.right(point)) for point, _ in POINTS),
            ]
            for row in rows
        ],
    )


def _healthy(rows: Sequence[Row]) -> str:
    return _table(
        ["script", "variants", "ranks", "jobs", "found at warning or above"],
        [
            [
                f"[{row.header.name}](../examples/healthy/{row.header.path.name})",
                " ".join(row.header.cases) or "one",
                " ".join(map(str, row.header.ranks)),
                str(len(row.verdicts)),
                row.found,
            ]
            for row in rows
        ],
    )


def _programs(programs: Sequence[Program]) -> str:
    return _table(
        ["program", "as without ddpcheck", "note"],
        [[program.name, f"{program.passed} of {program.total}", program.note] for program in programs],
    )


def _link(row: Row, folder: str = "") -> str:
    return f"[{row.header.name}](../examples/faults/{folder}{row.header.path.name})"


def _expected(row: Row) -> str:
    header = row.header
    where = "" if header.step in (None, -1) else f", step {header.step}"
    who = f", ranks {' '.join(map(str, header.outliers))}" if header.outliers else ""
    return f"{' '.join([header.expect, *header.also])}: {header.cause}{where}{who}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    # Quoted output may contain any character.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"
