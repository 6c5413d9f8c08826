"""`ddpcheck run` from its first to its last moment: folder, job, verdict, report, exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.agent.shm_exchange import create_exchange, signs, troubles
from ddpcheck.analysis.finding import Severity
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.analysis.report_builder import build_report
from ddpcheck.analysis.run_reader import RunReader, read_description
from ddpcheck.config import Config
from ddpcheck.errors import RunNotFound
from ddpcheck.launcher.environment import command_environment
from ddpcheck.launcher.live.view import live_show
from ddpcheck.launcher.monitor import RunMonitor
from ddpcheck.launcher.multi_node.coordination import (
    REPORT_FILE,
    beating,
    claim,
    is_shared,
    others,
    reports,
    say_done,
    wait_for_others,
    wait_for_report,
)
from ddpcheck.launcher.process.command import ExitStatus, leave_as
from ddpcheck.launcher.process.supervise import supervise
from ddpcheck.launcher.run_folder import RunFolder, begin_run, finish_run, make_run_folder, write_report
from ddpcheck.records.node_log import NodeLog
from ddpcheck.reports.outputs import page_of, write_outputs
from ddpcheck.sampling.sampler import Sampler

if TYPE_CHECKING:
    from ddpcheck.cli.run_options import RunOptions


@contextlib.contextmanager
def board_file() -> Iterator[Path | None]:
    """A board that only this user can open; None where there is no room for one.

    Never in the run folder: that may lie on a network file system, where a shared mapping can fail in ways
    that kill a process.
    """
    path: Path | None = None
    for folder in ("/dev/shm", tempfile.gettempdir()):
        candidate = Path(folder) / f"ddpcheck-{os.getuid()}-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            create_exchange(candidate)
            path = candidate
            break
    try:
        yield path
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


FOUND_SOMETHING = 10
NOT_JUDGED = 1
TICK_SECONDS = 0.1
# For which other nodes are waited for when this one was told to end.
SHORT_PATIENCE = 5.0
MOST_NAMED = 16


@dataclass(frozen=True)
class _Ended:
    """The job is over on this node."""

    # Read as far as the follower came.
    run: RunReader
    status: ExitStatus
    seconds: float
    # Lines that could not be added to the node's log.
    unwritten: int


def run_watched(command: Sequence[str], options: RunOptions) -> int:
    """Run the command under watch and return the exit status of `ddpcheck run`."""
    folder = make_run_folder(command, out=options.out, name=options.name or "", run_id=options.run_id)
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
        ended = _watch(command, config, folder, options)
        own_ranks: set[int] = set()
        if board is not None:
            _note_troubles(board, folder.path)
            own_ranks = set(signs(board))
    status = ended.status
    say_done(folder.path, status.returncode, status.stop_reason)
    if is_shared(folder.path):
        return _judge_together(ended, folder, options, own_ranks)
    finish_run(folder, status.returncode, ended.seconds, status.stop_reason, ended.unwritten)
    return _judge(ended.run, folder, status, options)


def _judge_together(ended: _Ended, folder: RunFolder, options: RunOptions, own_ranks: set[int]) -> int:
    """Several nodes work in this folder: one of them reports, and all leave by its verdict."""
    run, status = ended.run, ended.status
    # Whoever stopped the job by a signal wants it to end.
    patience = options.wait_nodes if status.signal is None else min(options.wait_nodes, SHORT_PATIENCE)
    run.poll()
    if not reports(run, not folder.joined, own_ranks):
        report = wait_for_report(folder.path, patience)
        while report is None and not claim(folder.path):
            report = wait_for_report(folder.path, patience)
        if report is not None:
            if not options.quiet:
                sys.stderr.write(f"ddpcheck: the report of all nodes is {folder.path / REPORT_FILE}\n")
            return _leave_by(status, _severities(report), options.fail_on)
        sys.stderr.write("ddpcheck: no other node has reported; this one does, as far as it can see\n")
    with beating(folder.path):
        late = wait_for_others(folder.path, patience)
        if late:
            sys.stderr.write(f"ddpcheck: reporting without the end of {_few(late)}\n")
        ends = [end for end in others(folder.path).values() if end is not None]
        exit_code = next((code for code in [status.returncode, *(end.status for end in ends)] if code), 0)
        stopped = next((why for why in [status.stop_reason, *(end.stopped for end in ends)] if why), "")
        finish_run(folder, exit_code, ended.seconds, stopped, ended.unwritten)
        return _judge(run, folder, status, options)


def _few(hosts: Sequence[str]) -> str:
    more = len(hosts) - MOST_NAMED
    return ", ".join(hosts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _watch(command: Sequence[str], config: Config, folder: RunFolder, options: RunOptions) -> _Ended:
    """Run the command to its end."""
    node_log = NodeLog(folder.path)
    run = RunReader(folder.path, node_log.host)
    sampler = Sampler(folder.path, options.sample_hz)
    started = time.monotonic()
    with live_show(run, folder.name, options.live, options.quiet) as show:
        follower = RunMonitor(run, node_log, config, sampler, show)
        try:
            status = supervise(
                command,
                command_environment(config),
                on_tick=follower.tick,
                tick_seconds=TICK_SECONDS,
                node_log=node_log,
                screen=show.pane if show is not None else None,
            )
        finally:
            follower.close()
            node_log.close()
    # A follower that stumbled has lost its place in the files: read them once more from the beginning.
    read = RunReader(folder.path) if follower.stumbled else run
    return _Ended(read, status, time.monotonic() - started, node_log.lost + sampler.unwritten)


def _note_troubles(board: Path, folder: Path) -> None:
    """A rank that could not write to its file could still say so on the board."""
    node_log = NodeLog(folder)
    with contextlib.suppress(OSError):
        for rank, pid, text in troubles(board):
            node_log.write("trouble", rank=rank, pid=pid, host=node_log.host, text=text)
    node_log.close()


def _judge(run: RunReader, folder: RunFolder, status: ExitStatus, options: RunOptions) -> int:
    """The report, and the exit status. Whatever goes wrong from here on is not the job's fault."""
    try:
        course = options.outputs.tensorboard is not None
        report = build_report(run, read_description(folder.path), course=course)
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
    write_report(report, folder.path)
    if not options.quiet or report.verdict is not Verdict.OK:
        _show(report, page_of(options.outputs, folder.path))
    # On stderr too: stdout is the job's own.
    well = write_outputs(report, options.outputs, folder.path, sys.stderr)
    if well and options.outputs.tensorboard is not None and not options.quiet:
        sys.stderr.write(f"ddpcheck: `ddpcheck view {folder.path}` shows this run in TensorBoard\n")
    left_by = _leave_by(status, [finding.severity for finding in report.findings], options.fail_on)
    # A CI job that waits for a file must not take its absence for success.
    return left_by or (0 if well else NOT_JUDGED)


def _leave_by(status: ExitStatus, found: Sequence[Severity], fail_on: str) -> int:
    """The exit status of `ddpcheck run`."""
    if status.stop_reason:
        return FOUND_SOMETHING
    if status.signal is not None:
        leave_as(status)
    if status.returncode:
        return status.returncode
    return FOUND_SOMETHING if _fails(found, fail_on) else 0


def _fails(found: Sequence[Severity], fail_on: str) -> bool:
    if fail_on == "never":
        return False
    bar = Severity(fail_on).weight
    return any(severity.weight >= bar for severity in found)


def _severities(report: Mapping[str, Any]) -> list[Severity]:
    """Of the findings in a report.json that another node wrote."""
    known = {severity.value for severity in Severity}
    said = [finding.get("severity") for finding in report.get("findings", ())]
    return [Severity(severity) for severity in said if severity in known]


def _show(report: Report, page: Path | None) -> None:
    from rich.console import Console

    from ddpcheck.reports.terminal.report import render

    # The job's own output may have ended in the middle of a line.
    console = Console(stderr=True)
    console.print()
    render(report, console, page)
