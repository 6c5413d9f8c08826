"""Writes report.json into a run folder."""

from __future__ import annotations

import sys
from pathlib import Path

from ddpcheck.analysis.report import Report


def write_report(report: Report, folder: Path) -> None:
    """A disk that is full by now costs this file, and is told."""
    from ddpcheck.reports.json_report import to_json
    from ddpcheck.reports.whole_file import write_whole

    try:
        write_whole(folder / "report.json", to_json(report), mode=0o600)
    except OSError as error:
        sys.stderr.write(f"ddpcheck: report.json could not be written: {error.strerror} ({folder})\n")
