"""Follows a run from another process, through its folder, until it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpcheck.analysis.live.tracker import LiveRank, LiveState, LiveTracker
from ddpcheck.analysis.run_reader import RunReader, read_description
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.records.reader import read_run_file

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
        ended = "ended" in description or (not description and _all_ranks_ended(state))
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
    """Without a launcher (`import ddpcheck.auto`), the end of all ranks is the end of the run."""
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
