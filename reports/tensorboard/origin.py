"""What a folder for TensorBoard was made from, to tell whether it still shows the run as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddpcheck.version import VERSION

MARK = "ddpcheck.json"
_MADE_FROM = ("run.json", "rank-*.jsonl", "node-*.jsonl", "links.json", "gradients/*.safetensors", "traces/*")


def mark_of(run: Path) -> dict[str, Any]:
    """How many files there are, how large they are together, and the latest time one was written."""
    found = [path.stat() for pattern in _MADE_FROM for path in run.glob(pattern)]
    return {
        "ddpcheck": VERSION,
        "files": len(found),
        "bytes": sum(each.st_size for each in found),
        "latest": max((each.st_mtime_ns for each in found), default=0),
    }


def is_current(run: Path, folder: Path) -> bool:
    try:
        written = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(written == mark_of(run))
