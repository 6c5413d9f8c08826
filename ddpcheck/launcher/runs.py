"""Runs in a folder, seen from another process: lists them, and follows one until it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ddpcheck.analysis.live.tracker import LiveRank, LiveState, LiveTracker
from ddpcheck.analysis.run_reader import RunReader, read_description
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.launcher.run_folder import can_still_grow, has_own_launcher
from ddpcheck.records.reader import REPORT_FILE, RUN_FILE, is_run_folder, read_run_file
from ddpcheck.records.registry import RANK_FILES

POLL_SECONDS = 0.5


class RunFollower:
    """Iterating yields the state of the run every POLL_SECONDS; the last one after the run has ended."""

    def __init__(self, path: Path) -> None:
        self.run = RunReader(path)
        self._path = path
        description = read_description(path)
        name = str(description.get("name") or path.name)
        self._tracker = LiveTracker(self.run, name, _started(description) or path.stat().st_mtime)

    def __iter__(self) -> Iterator[LiveState]:
        while True:
            state = self.read_state()
            yield state
            if state.ended or state.abandoned:
                return
            time.sleep(POLL_SECONDS)

    def read_state(self) -> LiveState:
        # Read before the records: if run.json says that the run has ended, the records are complete.
        description = read_run_file(self._path)
        self.run.poll()
        state = self._tracker.state(time.time())
        ended = "ended" in description or (
            not (description and has_own_launcher(description)) and _all_ranks_ended(state)
        )
        seconds = description.get("seconds")
        if ended and isinstance(seconds, int | float):
            state = replace(state, seconds=float(seconds))
        if ended:
            state = replace(state, ranks=tuple(map(_final_status, state.ranks)))
        return replace(state, ended=ended, abandoned=not ended and launcher_has_ended(description))


def launcher_has_ended(description: dict[str, Any]) -> bool:
    """Whether the launcher of an unfinished run was on this host and no longer exists."""
    pid, host = description.get("pid"), description.get("host")
    if "ended" in description or host != os.uname().nodename or not isinstance(pid, int):
        return False
    return process_start(pid) != description.get("pid_start")


def _all_ranks_ended(state: LiveState) -> bool:
    """Without a launcher of ours (`ddpcheck env`, `ddpcheck.auto`), the end of all ranks is the end of the run."""
    complete = len(state.ranks) >= state.world_size > 0
    return complete and all(rank.status != "running" for rank in state.ranks)


def _final_status(rank: LiveRank) -> LiveRank:
    """A rank without an end record at the end of the run has vanished."""
    return replace(rank, status="vanished") if rank.status == "running" else rank


def _started(description: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(description.get("started"))).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True)
class PastRun:
    """One run folder. `state` is the verdict, or why there is none: torn, unreported, foreign, unfinished, running."""

    folder: str
    state: str
    name: str = ""
    # ISO 8601; `began` is the same in seconds since 1970, for sorting.
    started: str = ""
    began: float = 0.0
    world_size: int | None = None
    steps: int | None = None
    seconds: float | None = None
    codes: tuple[str, ...] = ()
    size: int = 0


class _Finding(msgspec.Struct):
    code: str = ""
    severity: str = ""


class _Report(msgspec.Struct):
    """The keys of report.json that the list needs. The decoder skips all others."""

    verdict: str
    world_size: int
    steps: int
    findings: list[_Finding] = []


def past_runs(folder: Path) -> list[PastRun]:
    """All runs in `folder`, newest first."""
    folders = [path for path in folder.iterdir() if path.is_dir()]
    # A folder of runs may hold other folders too; one without any run is no folder of runs.
    if not any(is_run_folder(path) for path in folders):
        return []
    runs = [_past_run(path) for path in folders]
    return sorted(runs, key=lambda run: (run.began, run.folder), reverse=True)


def _past_run(path: Path) -> PastRun:
    description = read_run_file(path)
    report, damaged = _read_report(path)
    seconds = description.get("seconds")
    started = str(description.get("started") or "")
    return PastRun(
        folder=path.name,
        state=report.verdict if report is not None else _state_without_report(path, description, damaged),
        name=str(description.get("name") or ""),
        started=started,
        began=_start_time(started, path),
        world_size=report.world_size if report is not None else None,
        steps=report.steps if report is not None else None,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        codes=_codes(report),
        size=_size(path),
    )


def _read_report(path: Path) -> tuple[_Report | None, bool]:
    """The report, and whether there is one that cannot be read."""
    try:
        return msgspec.json.decode((path / REPORT_FILE).read_bytes(), type=_Report), False
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError):
        return None, True


def _state_without_report(path: Path, description: dict[str, Any], damaged: bool) -> str:
    if damaged or (not description and (path / RUN_FILE).exists()):
        return "torn"
    if not description:
        return "unreported" if any(path.glob(RANK_FILES)) else "foreign"
    if "ended" in description:
        return "unreported"
    if not has_own_launcher(description):
        return "running" if can_still_grow(path, description) else "unreported"
    return "unfinished" if launcher_has_ended(description) else "running"


def _codes(report: _Report | None) -> tuple[str, ...]:
    """Errors and warnings before notes, each code once."""
    findings = report.findings if report is not None else []
    important = [finding.code for finding in findings if finding.severity != "note"]
    return tuple(dict.fromkeys([*important, *(finding.code for finding in findings)]))


def _start_time(started: str, path: Path) -> float:
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        pass
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Total bytes of all readable files."""
    total = 0
    for parent, _, names in os.walk(path, onerror=None):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total
