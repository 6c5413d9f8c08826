"""Runs that schedulers start: their folders, and reports that one of several launchers has printed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.reader import RecordFile
from tests.helpers.commands import BIN, CommandResult, environment
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import WatchedRun, read_run

STEPS = 3
DDPCHECK = BIN / "ddpcheck"
RANK = (sys.executable, JOBS / "by_scheduler.py")
_LIMIT_SECONDS = 300.0


def only_run(folder: Path, job: CommandResult) -> WatchedRun:
    """The only run in `folder`/ddpcheck-runs."""
    [run] = runs_in(folder)
    return read_run(job, run)


def runs_in(folder: Path) -> list[Path]:
    """The run folders in `folder`/ddpcheck-runs, oldest first."""
    runs = folder / "ddpcheck-runs"
    return sorted(
        (path for path in runs.glob("*") if path.is_dir()), key=lambda path: path.stat().st_ctime_ns
    )


def assert_one_report(job: CommandResult, code: str) -> None:
    """One of the launchers has printed the report, to its end."""
    assert job.stderr.count(f"error {code}") == 1, str(job)
    assert job.stderr.count("Next: ") == 1, str(job)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {_LIMIT_SECONDS:g} s"
        time.sleep(0.2)


def have_stepped(run: Path, ranks: int) -> bool:
    """Whether each rank has taken a step."""
    files = list(run.glob("rank-*.jsonl")) if run.is_dir() else []
    return len(files) == ranks and all(map(_has_step, files))


def _has_step(path: Path) -> bool:
    """The file may end within a record."""
    file = RecordFile(path)
    while records := file.read():
        if any(isinstance(each, DigestRecord) and each.stage == Stage.PARAMS.value for each in records):
            return True
    return False


def run_quickly(*command: object, **environ: str) -> str:
    """The output of a command of the scheduler."""
    words = list(map(str, command))
    done = subprocess.run(words, env=environment(**environ), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def batch_script(path: Path, lines: str, options: Mapping[str, object] | None = None) -> Path:
    """A script for sbatch, with its output beside it."""
    given = {"output": path.with_suffix(".out"), "job-name": path.stem, **(options or {})}
    words = [f"--{name}={value}" if value != "" else f"--{name}" for name, value in given.items()]
    head = "".join(f"#SBATCH {word}\n" for word in words)
    path.write_text(f"#!/bin/bash\n{head}{lines}")
    return path
