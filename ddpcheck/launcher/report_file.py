"""Writes report.json into a run folder."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ddpcheck.analysis.result import Report


def write_report(report: Report, folder: Path) -> None:
    """A disk that is full by now costs this file, and is told."""
    from ddpcheck.reports.json_report import to_json

    # Under another name first: half a report.json would be worse for its readers than none.
    path, temporary = folder / "report.json", folder / f".report.json.{os.uname().nodename}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(to_json(report))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        sys.stderr.write(f"ddpcheck: report.json could not be written: {error.strerror} ({folder})\n")
