"""The reading side of a run folder: names of its files, and run.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddpcheck.records.registry import RANK_FILES

# Where `ddpcheck run` creates run folders by default.
RUNS_FOLDER = "ddpcheck-runs"
RUN_FILE = "run.json"
REPORT_FILE = "report.json"


def is_run_folder(path: Path) -> bool:
    """Whether the folder contains run.json or records of at least one rank."""
    return path.is_dir() and ((path / RUN_FILE).exists() or any(path.glob(RANK_FILES)))


def read_run_file(path: Path) -> dict[str, Any]:
    """run.json of the run folder `path`; empty if the file is missing or damaged."""
    try:
        record = json.loads((path / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
