"""`ddpcheck run` from its first to its last moment: folder, job, verdict, report, exit status."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.agent.board import troubles
from ddpcheck.analysis.analyse import conclude
from ddpcheck.analysis.findings import Severity
from ddpcheck.analysis.result import Report, Verdict
from ddpcheck.analysis.run import Run, read_description
from ddpcheck.config import Config
from ddpcheck.errors import RunNotFound
from ddpcheck.launcher.board_file import board_file
from ddpcheck.launcher.environment import command_environment
from ddpcheck.launcher.follower import Follower
from ddpcheck.launcher.node_log import NodeLog
from ddpcheck.launcher.process import ExitStatus, leave_as
from ddpcheck.launcher.run_folder import RunFolder, begin_run, finish_run, make_run_folder
from ddpcheck.launcher.supervise import supervise
from ddpcheck.reports.outputs import page_of, write_outputs
from ddpcheck.sampling.sampler import Sampler

if TYPE_CHECKING:
    from ddpcheck.cli.run_options import RunOptions

FOUND_SOMETHING = 10
NOT_JUDGED = 1
TICK_SECONDS = 0.1


def run_watched(command: Sequence[str], options: RunOptions) -> int:
    """Run the command under watch and return the exit status of `ddpcheck run`."""
    folder = make_run_folder(command, out=options.out, name=options.name or "")
    with board_file() as board:
        config = Config(
            run_dir=str(folder.path),
            run_id=folder.run_id,
            every=options.every,
            optimizer_state=options.optimizer_state,
            gradients=options.gradients,
            save_gradients=options.save_gradients,
            sketch_every=options.sketch_every,
            profile=options.profile,
            fail_fast=options.fail_fast,
            board=str(board) if board is not None else "",
            hang_timeout=options.hang_timeout,
        )
        folder = begin_run(folder, command, config)
        run, status, seconds = _watch(command, config, folder, options.sample_hz)
        if board is not None:
            _note_troubles(board, folder.path)
    finish_run(folder, status.returncode, seconds, stopped=status.stop_reason)
    return _judge(run, folder, status, options)


def _watch(
    command: Sequence[str], config: Config, folder: RunFolder, sample_hz: float
) -> tuple[Run, ExitStatus, float]:
    """Run the command to its end; the run comes back read as far as the follower came."""
    run = Run(folder.path)
    node_log = NodeLog(folder.path)
    follower = Follower(run, node_log, config, Sampler(folder.path, sample_hz))
    started = time.monotonic()
    try:
        status = supervise(
            command,
            command_environment(config),
            on_tick=follower.tick,
            tick_seconds=TICK_SECONDS,
            node_log=node_log,
        )
    finally:
        follower.close()
        node_log.close()
    # A follower that stumbled has lost its place in the files: read them once more from the beginning.
    return Run(folder.path) if follower.stumbled else run, status, time.monotonic() - started


def _note_troubles(board: Path, folder: Path) -> None:
    """A rank that could not write to its file could still say so on the board."""
    node_log = NodeLog(folder)
    with contextlib.suppress(OSError):
        for rank, pid, text in troubles(board):
            node_log.write("trouble", rank=rank, pid=pid, host=node_log.host, text=text)
    node_log.close()


def _judge(run: Run, folder: RunFolder, status: ExitStatus, options: RunOptions) -> int:
    """The report, and the exit status. Whatever goes wrong from here on is not the job's fault."""
    try:
        report = conclude(run, read_description(folder.path))
    except RunNotFound:
        sys.stderr.write(f"ddpcheck: the run folder {folder.path} is gone: there is nothing to report on\n")
        return status.returncode or NOT_JUDGED
    except Exception as error:
        sys.stderr.write(
            f"ddpcheck: the records in {folder.path} could not be analysed ({type(error).__name__}: "
            f"{error}); they are kept, and `ddpcheck report {folder.path}` tries again\n"
        )
        # Not 0: a job that could not be judged must not pass for one that was found sound.
        return status.returncode or NOT_JUDGED
    _write_report(report, folder.path)
    if not options.quiet or report.verdict is not Verdict.OK:
        _show(report, page_of(options.outputs, folder.path))
    # On stderr too: stdout is the job's own.
    well = write_outputs(report, options.outputs, folder.path, sys.stderr)
    if status.stop_reason:
        return FOUND_SOMETHING
    if status.signal is not None:
        leave_as(status)
    if status.returncode:
        return status.returncode
    if _fails(report, options.fail_on):
        return FOUND_SOMETHING
    # A CI job that waits for a file must not take its absence for success.
    return 0 if well else NOT_JUDGED


def _fails(report: Report, fail_on: str) -> bool:
    if fail_on == "never":
        return False
    bar = Severity(fail_on).weight
    return any(finding.severity.weight >= bar for finding in report.findings)


def _write_report(report: Report, folder: Path) -> None:
    from ddpcheck.reports.json_report import to_json
    from ddpcheck.reports.whole_file import write_whole

    try:
        write_whole(folder / "report.json", to_json(report), mode=0o600)
    except OSError as error:
        sys.stderr.write(f"ddpcheck: report.json could not be written: {error.strerror} ({folder})\n")


def _show(report: Report, page: Path | None) -> None:
    from rich.console import Console

    from ddpcheck.reports.terminal import render

    # The job's own output may have ended in the middle of a line.
    console = Console(stderr=True)
    console.print()
    render(report, console, page)
