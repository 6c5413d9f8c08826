"""The table of step times in docs/cost.md and in both READMEs, between two comments. step_time.py writes it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "cost.md"
# Pages that quote rows of it.
QUOTING = (ROOT / "README.md", ROOT / "docs" / "ko" / "README.md")
HEAD = ("| job | target | wall time | processor time |", "|---|---|---:|---:|")
_TABLE = re.compile(r"(<!-- cost table: begin[^>]*-->\n\n)(.*?)(\n\n<!-- cost table: end -->)", re.DOTALL)


def read(path: Path) -> dict[str, list[str]]:
    """The rows of the table in `path`, by job."""
    found = _TABLE.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path} has no table of step times")
    lines = found[2].splitlines()[len(HEAD) :]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in rows}


def update(path: Path, rows: list[list[str]], measured: set[str]) -> None:
    """Replace the table by `rows`; those of jobs that were not measured keep the figures that they have there."""
    before = read(path)
    kept = [row if row[0] in measured else before.get(row[0], row) for row in rows]
    lines = [*HEAD, *(f"| {' | '.join(row)} |" for row in kept)]
    text = path.read_text(encoding="utf-8")
    path.write_text(_TABLE.sub(lambda found: found[1] + "\n".join(lines) + found[3], text), encoding="utf-8")
