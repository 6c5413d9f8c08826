"""Implementation of `ddpcheck collect`: the verdict on a run whose ranks another program has started."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.analysis.run_reader import RunReader, read_description
from ddpcheck.config import Config
from ddpcheck.errors import UsageError
from ddpcheck.formatting import name_ranks
from ddpcheck.launcher.process.command import ExitStatus
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.launcher.run import NO_REPORT_STATUS, report_run
from ddpcheck.launcher.run_folder import RunFolder, begin_run, finish_run, has_own_launcher
from ddpcheck.launcher.runs import launcher_has_ended
from ddpcheck.records.reader import RUN_FILE
from ddpcheck.reports.outputs import Outputs

_POLL_SECONDS = 0.5
# A rank on another host counts as running while its file has grown within this time.
_GROWING_SECONDS = 30.0


def collect(path: Path, config: Config, outputs: Outputs, *, wait: float, exit_code: int | None) -> int:
    """Report on the run, mark it as ended, and return the exit status of `ddpcheck collect`.

    `exit_code`: the exit status of the job, where it is known.
    """
    path = path.absolute()
    description = read_description(path)
    if _has_launcher(description):
        raise UsageError(f"{path}: `ddpcheck run` has not ended this run; its report comes at the end")
    if not (path / RUN_FILE).exists():
        # The ranks have created the folder.
        begin_run(RunFolder(path, path.name, path.name), [], Config(own_launcher=False, run_dir=str(path)))
    running = _wait_for_ranks(path, wait)
    run = RunReader(path)
    run.poll()
    folder = RunFolder(path, str(description.get("id", path.name)), str(description.get("name", path.name)))
    if running:
        sys.stderr.write(
            f"ddpcheck: {name_ranks(running)} still write records; this report is preliminary. "
            f"Next: `ddpcheck collect {path}` when the job has ended\n"
        )
    elif "ended" not in description:
        finish_run(folder, exit_code, _seconds(run, path))
    status = report_run(run, folder, ExitStatus(exit_code or 0), config, outputs)
    return status or (NO_REPORT_STATUS if running else 0)


def _has_launcher(description: dict[str, Any]) -> bool:
    """Whether a launcher of ours works on this run and exists, as far as this host can see."""
    if not description or "ended" in description or not has_own_launcher(description):
        return False
    return not launcher_has_ended(description)


@dataclass(frozen=True)
class _Writer:
    """A rank without an end record."""

    rank: int
    host: str
    pid: int
    started: int

    def runs(self, path: Path) -> bool:
        if self.host == os.uname().nodename and process_start(self.pid) == self.started:
            return True
        # Another host, or another process namespace of this one.
        ages = [time.time() - each.stat().st_mtime for each in path.glob(f"rank-{self.rank:05d}*")]
        return self.host != os.uname().nodename and min(ages, default=_GROWING_SECONDS) < _GROWING_SECONDS


def _wait_for_ranks(path: Path, seconds: float) -> tuple[int, ...]:
    """The ranks that still run after up to `seconds`."""
    deadline = time.monotonic() + seconds
    run = RunReader(path)
    while True:
        run.poll()
        running = tuple(writer.rank for writer in _writers(run) if writer.runs(path))
        if not running or time.monotonic() >= deadline:
            return running
        time.sleep(_POLL_SECONDS)


def _writers(run: RunReader) -> list[_Writer]:
    """Of the last launch of the job: earlier ones have ended."""
    attempts = run.ordered()
    ranks = attempts[-1].ranks.values() if attempts else ()
    headers = [rank.header for rank in ranks if rank.end is None]
    return [_Writer(each.rank, each.host, each.pid, each.ticks) for each in headers]


def _seconds(run: RunReader, path: Path) -> float:
    """From the first header to the last record."""
    began = [attempt.started for attempt in run.attempts.values()]
    ended = [each.stat().st_mtime for each in path.glob("rank-*")]
    return max(0.0, max(ended) - min(began)) if began and ended else 0.0
