"""What is known of the runs in a folder without reading their records."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ddpcheck.launcher.multi_node.coordination import REPORT_FILE
from ddpcheck.launcher.multi_node.remote_follow import launcher_is_gone
from ddpcheck.launcher.run_folder import RUN_FILE, read_run_file
from ddpcheck.records.registry import RANK_FILES


@dataclass(frozen=True)
class PastRun:
    """One folder. `state` is the verdict, or the one word for why there is none."""

    folder: str
    state: str
    name: str = ""
    # ISO 8601, and seconds since 1970 for the order.
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
    """The few keys of report.json that are needed; the rest, which may be long, is passed over."""

    verdict: str
    world_size: int
    steps: int
    findings: list[_Finding] = []


def past_runs(folder: Path) -> list[PastRun]:
    """All that is in `folder`, the newest first."""
    found = [_past_run(path) for path in folder.iterdir() if path.is_dir()]
    return sorted(found, key=lambda run: (run.began, run.folder), reverse=True)


def _past_run(path: Path) -> PastRun:
    description = read_run_file(path)
    report, torn = _report(path)
    seconds = description.get("seconds")
    started = str(description.get("started") or "")
    return PastRun(
        folder=path.name,
        state=report.verdict if report is not None else _why_not(path, description, torn),
        name=str(description.get("name") or ""),
        started=started,
        began=_time(started, path),
        world_size=report.world_size if report is not None else None,
        steps=report.steps if report is not None else None,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        codes=_codes(report),
        size=_size(path),
    )


def _report(path: Path) -> tuple[_Report | None, bool]:
    """And whether there is one that cannot be read."""
    try:
        return msgspec.json.decode((path / REPORT_FILE).read_bytes(), type=_Report), False
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError):
        return None, True


def _why_not(path: Path, description: dict[str, Any], torn: bool) -> str:
    if torn or (not description and (path / RUN_FILE).exists()):
        return "torn"
    if not description:
        return "unreported" if any(path.glob(RANK_FILES)) else "foreign"
    if "ended" in description:
        return "unreported"
    return "unfinished" if launcher_is_gone(description) else "running"


def _codes(report: _Report | None) -> tuple[str, ...]:
    """Those that matter first, each once."""
    findings = report.findings if report is not None else []
    graver = [finding.code for finding in findings if finding.severity != "note"]
    return tuple(dict.fromkeys([*graver, *(finding.code for finding in findings)]))


def _time(started: str, path: Path) -> float:
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        pass
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Of all files in it that can be looked at."""
    total = 0
    for parent, _, names in os.walk(path, onerror=None):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total
