"""Fixtures that run a command in a folder of its own, with or without `ddpcheck run` around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.commands import CommandResult
from tests.helpers.watched_run import Run, RunWatched, WatchedRun, run_to_end, run_watched


@pytest.fixture
def unwatched(tmp_path: Path) -> Run:
    """Runs a command without ddpcheck."""

    def run(*command: object, **env: str) -> CommandResult:
        return run_to_end(command, tmp_path, env)

    return run


@pytest.fixture
def ddpcheck(tmp_path: Path) -> RunWatched:
    """Runs a command under `ddpcheck run`."""

    def run(
        *command: object, options: Sequence[object] = (), out: Path | None = None, **env: str
    ) -> WatchedRun:
        return run_watched(command, tmp_path, options=options, out=out, env=env)

    return run
