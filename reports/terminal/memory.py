"""The table of memory: what each rank holds, ranks that hold about the same in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import rank_ranges
from ddpcheck.reports.terminal.console import LABEL, ReportConsole, indented

if TYPE_CHECKING:
    from ddpcheck.analysis.memory.table import RankMemoryRow

_MOST_ROWS = 8
# A small model's memory is that of the interpreter; the figures are in report.json all the same.
_LEAST_BYTES = 10_000_000
_ALIKE = 0.05


def put_memory(ink: ReportConsole, report: Report) -> None:
    """Only where the model, or a finding about memory, is worth the table."""
    rows = report.memory["ranks"] if report.memory is not None else []
    told = any(finding.code == "DDP501" for finding in report.findings)
    if not rows or not (told or max(row["parameters"] for row in rows) >= _LEAST_BYTES):
        return
    groups = alike(rows)
    headers = ["rank", "most", "weights", "gradients", "buckets", "optimizer", "buffers", "rest", "before"]
    where = "on the device" if rows[0]["measured"] == "allocated" else "of the processes"
    ink.gap()
    ink.put(
        ink.text(f"Memory {where}, MB", LABEL),
        indented(ink.columns(headers, [_row(group) for group in groups[:_MOST_ROWS]])),
    )
    if len(groups) > _MOST_ROWS:
        ink.put(ink.text("more ranks are in report.json"), indent=2)


def alike(rows: list[RankMemoryRow]) -> list[list[RankMemoryRow]]:
    """Ranks that hold about the same, together."""
    groups: list[list[RankMemoryRow]] = []
    for row in rows:
        group = next((each for each in groups if _same(each[0], row)), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def _same(one: RankMemoryRow, other: RankMemoryRow) -> bool:
    return abs(one["most"] - other["most"]) <= _ALIKE * max(one["most"], other["most"])


def _row(group: list[RankMemoryRow]) -> list[object]:
    row = max(group, key=lambda each: each["most"])
    figures = (row["buckets"], row["optimizer_state"], row["buffers"], row["rest"], row["before"])
    return [
        rank_ranges(each["rank"] for each in group),
        _megabytes(row["most"]),
        _megabytes(row["parameters"]),
        "in buckets" if row["gradients_in_buckets"] else _megabytes(row["gradients"]),
        *map(_megabytes, figures),
    ]


def _megabytes(size: int) -> str:
    """One unit for the whole table, so that figures can be added up by eye."""
    return f"{size / 1e6:,.0f}" if size >= 1e7 or not size else f"{size / 1e6:.1f}"
