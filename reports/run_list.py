"""The table of past runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console

from ddpcheck.analysis.units import size_text
from ddpcheck.reports.ink import Ink
from ddpcheck.reports.live_text import clock_text

_MOST_CODES = 3
# Folders that were named by ddpcheck begin with the time.
_TIMED = re.compile(r"\d{8}-\d{6}-")
_STYLES = {"ok": "green", "findings": "bold red", "failed": "bold red", "running": "cyan"}


class Listed(Protocol):
    """What is known of one run without reading its records."""

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


def render_list(runs: Sequence[Listed], where: str, console: Console) -> None:
    """One row a run, in the order they come."""
    ink = Ink(console)
    if not runs:
        ink.put(ink.text(f"There is no run in {where}."))
        return
    # The time is told once.
    apart = any(run.started and not _TIMED.match(run.folder) for run in runs)
    headers = [
        "run",
        *(["started"] if apart else []),
        "ranks",
        "steps",
        "took",
        "verdict",
        "findings",
        "size",
    ]
    ink.put(ink.columns(headers, [_row(ink, run, apart) for run in runs]))


def _row(ink: Ink, run: Listed, apart: bool) -> list[object]:
    return [
        run.folder,
        *([run.started[:16].replace("T", " ")] if apart else []),
        "-" if run.world_size is None else run.world_size,
        "-" if run.steps is None else run.steps,
        "-" if run.seconds is None else clock_text(run.seconds),
        ink.text(run.state, _STYLES.get(run.state, "yellow")),
        _codes(run.codes),
        size_text(run.size),
    ]


def _codes(codes: Sequence[str]) -> str:
    more = f" +{len(codes) - _MOST_CODES}" if len(codes) > _MOST_CODES else ""
    return " ".join(codes[:_MOST_CODES]) + more
