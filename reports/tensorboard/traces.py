"""The ranks' traces where torch-tb-profiler looks for them: all in one folder, named after workers."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ddpcheck.analysis.overlap.model import Overlap

# A worker, an optional number, and the ending: what the plugin takes for a trace.
_WORKER = re.compile(r".+\.\d+\.pt\.trace\.json(\.gz)?")


def link_traces(overlap: Overlap | None, run: Path, into: Path, stands_at: Path) -> int:
    """Links to the traces of the profiled attempt, made in `into`, which will stand at `stands_at`; how many."""
    count = 0
    for rank in overlap.ranks if overlap else ():
        source = (run / rank.file).absolute()
        if source.is_file():
            into.mkdir(parents=True, exist_ok=True)
            _link(source, into, stands_at, _name(source, rank.rank))
            count += 1
    return count


def _name(source: Path, rank: int) -> str:
    if _WORKER.fullmatch(source.name) and f"rank{rank}." in source.name:
        return source.name
    ending = "json.gz" if source.name.endswith(".gz") else "json"
    return f"rank{rank}.{source.stat().st_mtime_ns}.pt.trace.{ending}"


def _link(source: Path, into: Path, stands_at: Path, name: str) -> None:
    """By a path from one to the other, so that a run folder may be moved; where links are not to be had, a copy."""
    try:
        (into / name).symlink_to(os.path.relpath(source, stands_at.absolute()))
    except OSError:
        shutil.copyfile(source, into / name)
