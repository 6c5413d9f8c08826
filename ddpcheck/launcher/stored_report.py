"""report.json of a run as its report, as long as nothing in the run folder has changed since it was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.errors import RunUnreadable
from ddpcheck.records.reader import REPORT_FILE
from ddpcheck.run_mark import mark_of

if TYPE_CHECKING:
    from ddpcheck.analysis.report import Report

# What report.json was made from, and its checksum.
MARK_FILE = "report.mark"


def write_report(report: Report, folder: Path, mark: dict[str, Any] | None = None) -> None:
    """Write report.json; an error goes to stderr and does not end the command.

    `mark`: of the folder, from before it was analysed as it is at the end.
    """
    from ddpcheck.reports.json_report import to_json
    from ddpcheck.reports.outputs import write_whole

    text = to_json(report)
    try:
        write_whole(folder / REPORT_FILE, text, mode=0o600)
    except OSError as error:
        sys.stderr.write(f"ddpcheck: cannot write {folder / REPORT_FILE}: {error.strerror}\n")
        return
    if mark is not None:
        with contextlib.suppress(OSError):
            write_whole(folder / MARK_FILE, json.dumps({**mark, "report": _checksum(text)}), mode=0o600)


def read_report(folder: Path) -> Report | None:
    """None where the records have to be analysed: they changed, or another version of ddpcheck wrote the report."""
    from ddpcheck.reports.json_report import from_json

    try:
        known = json.loads((folder / MARK_FILE).read_text(encoding="utf-8"))
        text = (folder / REPORT_FILE).read_text(encoding="utf-8")
        if known == {**mark_of(folder), "report": _checksum(text)}:
            report = from_json(text)
            # The folder may have been moved.
            return replace(report, run={**report.run, "path": str(folder)})
    except (OSError, ValueError, RecursionError, RunUnreadable):
        pass
    return None


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
