"""Follows a run from outside, by its folder alone, until it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpcheck.analysis.live.state import LiveRank, LiveState
from ddpcheck.analysis.live.tracker import LiveTracker
from ddpcheck.analysis.run_reader import RunReader, read_description
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.launcher.run_folder import read_run_file

PAUSE_SECONDS = 0.5


class RemoteFollow:
    """One run folder; iterating gives its state now and then, the last time when it is over."""

    def __init__(self, path: Path) -> None:
        self.run = RunReader(path)
        self._path = path
        description = read_description(path)
        name = str(description.get("name") or path.name)
        self._tracker = LiveTracker(self.run, name, _started(description) or path.stat().st_mtime)

    def __iter__(self) -> Iterator[LiveState]:
        while True:
            state = self.look()
            yield state
            if state.ended or state.abandoned:
                return
            time.sleep(PAUSE_SECONDS)

    def look(self) -> LiveState:
        """What is known by now."""
        # Read before the records: whatever is in them by then belongs to the end.
        description = read_run_file(self._path)
        self.run.poll()
        state = self._tracker.state(time.time())
        ended = "ended" in description or (not description and _all_have_left(state))
        seconds = description.get("seconds")
        if ended and isinstance(seconds, int | float):
            state = replace(state, seconds=float(seconds))
        if ended:
            state = replace(state, ranks=tuple(map(_at_the_end, state.ranks)))
        return replace(state, ended=ended, abandoned=not ended and launcher_is_gone(description))


def launcher_is_gone(description: dict[str, Any]) -> bool:
    """Whether the launcher of an unfinished run, on this very host, is no longer there."""
    pid, host = description.get("pid"), description.get("host")
    if "ended" in description or host != os.uname().nodename or not isinstance(pid, int):
        return False
    return process_start(pid) != description.get("pid_start")


def _all_have_left(state: LiveState) -> bool:
    """Of a run that nobody launched, as under `import ddpcheck.auto`, only the ranks themselves can tell."""
    whole = len(state.ranks) >= state.world_size > 0
    return whole and all(rank.status != "running" for rank in state.ranks)


def _at_the_end(rank: LiveRank) -> LiveRank:
    """A rank that has not said goodbye will not do so any more."""
    return replace(rank, status="vanished") if rank.status == "running" else rank


def _started(description: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(description.get("started"))).timestamp()
    except ValueError:
        return None
