"""The table of the start-up: how each rank came to its first step, and where the weights came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.report import Report
from ddpcheck.formatting import seconds_text, size_text
from ddpcheck.reports.terminal.console import LABEL, ReportConsole, indented

if TYPE_CHECKING:
    from ddpcheck.analysis.startup.table import StartupTable
    from ddpcheck.analysis.startup.timeline import RankTimeline

_MOST_ROWS = 8
# A small model's start says nothing; the figures are in report.json all the same.
_LEAST_BYTES = 10_000_000


def put_startup(ink: ReportConsole, report: Report) -> None:
    """Only where there were weights worth the table."""
    startup = report.startup
    if startup is None or max(startup["broadcast_bytes"], startup["loaded_bytes"]) < _LEAST_BYTES:
        return
    rows = sorted(startup["ranks"], key=lambda row: -(row["total"] or 0.0))[:_MOST_ROWS]
    rows.sort(key=lambda row: row["rank"])
    copied = ["copy"] if startup["copied_bytes"] else []
    headers = ["rank", "python", "torch", "group", "load", "read", *copied, "script", "wrap", "batch", "step"]
    table = ink.columns([*headers, "total"], [_row(row, bool(copied)) for row in rows])
    ink.gap()
    ink.put(ink.text("Start-up, seconds", LABEL), indented(table))
    if len(startup["ranks"]) > _MOST_ROWS:
        ink.put(ink.text(f"the {_MOST_ROWS} slowest; all are in report.json"), indent=2)
    ink.put(ink.text(" ".join(filter(None, (startup["summary"], _moved(startup))))), indent=2)


def _row(row: RankTimeline, copied: bool) -> list[object]:
    before = [row["interpreter"], row["torch"], row["group"], row["load"]]
    after = [row["copy"]] if copied else []
    after += [row["script"], row["wrap"], row["batch"], row["step"], row["total"]]
    return [row["rank"], *map(_time, before), _size(row["loaded_bytes"]), *map(_time, after)]


def _moved(startup: StartupTable) -> str:
    parts = []
    if startup["copied_bytes"]:
        rate = f" at {size_text(startup['copy_rate'])}/s" if startup["copy_rate"] else ""
        parts.append(f"{size_text(startup['copied_bytes'])} were copied to devices{rate}.")
    if startup["broadcast_bytes"] and startup["broadcast_seconds"] is not None:
        rate = f" ({size_text(startup['broadcast_rate'])}/s)" if startup["broadcast_rate"] else ""
        took = seconds_text(startup["broadcast_seconds"])
        parts.append(f"The broadcast of {size_text(startup['broadcast_bytes'])} took {took}{rate}.")
    return " ".join(parts)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _size(size: int) -> str:
    return size_text(size) if size else "-"
