"""The table of past runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console

from ddpcheck.formatting import size_text
from ddpcheck.reports.terminal.console import ReportConsole

_MOST_CODES = 8
_FINDINGS = "findings"
# Names that ddpcheck gives to folders begin with the start time.
_TIMED = re.compile(r"\d{8}-\d{6}-")
_STYLES = {"ok": "green", "findings": "bold red", "failed": "bold red", "running": "cyan"}


class ListedRun(Protocol):
    """A run as far as it is known without reading its records."""

    @property
    def folder(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def started(self) -> str: ...
    @property
    def world_size(self) -> int | None: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def codes(self) -> tuple[str, ...]: ...
    @property
    def size(self) -> int: ...


def render_list(runs: Sequence[ListedRun], where: str, console: Console) -> None:
    """One row for each run, in the given order."""
    out = ReportConsole(console)
    if not runs:
        out.put(out.text(f"No runs in {where}."))
        return
    # A start time in the name of the folder is not repeated.
    with_start = any(run.started and not _TIMED.match(run.folder) for run in runs)
    when = ["started"] if with_start else []
    headers = ["run", *when, "ranks", "steps", "duration", "verdict", "size", _FINDINGS]
    table = out.columns(headers, [_row(out, run, with_start) for run in runs])
    for title, column in zip(headers, table.columns, strict=True):
        # A wrapped name could not be copied.
        column.no_wrap = title != _FINDINGS
    out.put(table)


def _row(out: ReportConsole, run: ListedRun, with_start: bool) -> list[object]:
    return [
        run.folder,
        *([run.started[5:16].replace("T", " ")] if with_start else []),
        "-" if run.world_size is None else run.world_size,
        "-" if run.steps is None else run.steps,
        "-" if run.seconds is None else _duration(run.seconds),
        out.text(run.state, _STYLES.get(run.state, "yellow")),
        size_text(run.size),
        _codes(run.codes),
    ]


def _duration(seconds: float) -> str:
    """`0:42`, `12:05` or `2:10:00`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _codes(codes: Sequence[str]) -> str:
    more = f" +{len(codes) - _MOST_CODES}" if len(codes) > _MOST_CODES else ""
    return " ".join(codes[:_MOST_CODES]) + more
