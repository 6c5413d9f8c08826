"""Identifies the contents of a run folder by the number, sizes and times of its files, to see whether they changed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ddpcheck.version import VERSION

_SOURCES = (
    "run.json",
    "rank-*",
    "fault-*.jsonl",
    "folds.jsonl",
    "node-*.jsonl",
    "links.json",
    "captures/*",
    "gradients/*",
    "traces/*",
)


def mark_of(run: Path) -> dict[str, Any]:
    """The number of files, their total size and the latest time of modification."""
    stats = []
    for pattern in _SOURCES:
        for path in run.glob(pattern):
            # The launcher may fold it at this moment.
            with contextlib.suppress(FileNotFoundError):
                stats.append(path.stat())
    return {
        "ddpcheck": VERSION,
        "files": len(stats),
        "bytes": sum(each.st_size for each in stats),
        "latest": max((each.st_mtime_ns for each in stats), default=0),
    }
