"""The table of docs/compatibility.md: one row for each version of torch and Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.compat.environment import ROOT
from tests.compat.results import Results

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- rows: make compat -->", "<!-- end of rows -->"
_HEAD = (
    "| torch | Python | faults | variants of faults | healthy jobs | unchanged bits | survival, gradients |",
    "|---|---|---|---|---|---|---|",
)
_ROW = re.compile(r"\| (\d+)\.(\d+)\.(\d+) \| (\S+) \|")


def update(page: str, results: Results) -> str:
    """The page with the row of these results in place of an earlier one, newest version first."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {(results.torch, results.python): row(results)}
    for line in table.splitlines():
        if found := _ROW.match(line):
            rows.setdefault((".".join(found.groups()[:3]), found[4]), line)
    ordered = sorted(rows, key=_order, reverse=True)
    return "\n".join([before + BEGIN, *_HEAD, *(rows[key] for key in ordered), END + after])


def _order(key: tuple[str, str]) -> list[list[int]]:
    return [[int(number) for number in re.findall(r"\d+", version)] for version in key]


def row(results: Results) -> str:
    corpus = [_scripts(results.corpus.get(part, {})) for part in ("faults", "variants")]
    tests = [_tests(results.tests.get(part, {})) for part in ("identity", "survival")]
    cells = (results.torch, results.python, *corpus, _jobs(results.corpus.get("healthy", {})), *tests)
    return f"| {' | '.join(cells)} |"


def _scripts(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Scripts that gave what they expect, of those that were run."""
    run = [each for each in rows.values() if not each["skipped"]]
    right = sum(not each["misses"] for each in run)
    return _of(right, len(run), len(rows) - len(run))


def _jobs(rows: Mapping[str, Mapping[str, Any]]) -> str:
    run = [each for each in rows.values() if not each["skipped"]]
    return _of(sum(each["passed"] for each in run), sum(each["jobs"] for each in run), len(rows) - len(run))


def _tests(outcomes: Mapping[str, str]) -> str:
    run = [outcome for outcome in outcomes.values() if outcome != "skipped"]
    return _of(sum(outcome.startswith("passed") for outcome in run), len(run), 0)


def _of(right: int, total: int, left_out: int) -> str:
    if not total:
        return "-"
    return f"{right} of {total}" + (f", {left_out} not run" if left_out else "")
