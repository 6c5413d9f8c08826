"""Implementation of `ddpcheck run`: run folder, job, report, exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpcheck.agent.shm_exchange import heartbeats, write_errors
from ddpcheck.analysis.exit_policy import ExitPolicy, is_incomplete
from ddpcheck.analysis.finding import Severity
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import build_report
from ddpcheck.analysis.run_reader import PATIENCE_SECONDS, RunReader, read_description
from ddpcheck.config import Config
from ddpcheck.errors import RunNotFound
from ddpcheck.launcher.exchange_file import exchange_file, exchanges_in_use
from ddpcheck.launcher.live_view import live_view
from ddpcheck.launcher.metrics_export import MetricsExport, metrics_export
from ddpcheck.launcher.monitor import RunMonitor
from ddpcheck.launcher.multi_node.coordination import (
    claim_reporting,
    is_reporter,
    is_shared,
    log_done,
    other_launchers,
    reporting_heartbeat,
    wait_for_peers,
    wait_for_report,
    wait_for_reporter,
)
from ddpcheck.launcher.process.command import ExitStatus, command_environment, exit_like
from ddpcheck.launcher.process.supervise import supervise
from ddpcheck.launcher.run_folder import RunFolder, begin_run, finish_run, make_run_folder
from ddpcheck.launcher.stored_report import write_report
from ddpcheck.machine_identity import boot_id
from ddpcheck.records.node_log import NodeLog
from ddpcheck.records.reader import REPORT_FILE
from ddpcheck.reports.outputs import Outputs, page_of, write_outputs
from ddpcheck.reports.terminal.progress import ReadingProgress
from ddpcheck.run_mark import mark_of
from ddpcheck.sampling.sampler import Sampler

FINDINGS_STATUS = 10
NO_REPORT_STATUS = 1
# As a shell reports a command that SIGINT ended.
INTERRUPTED_STATUS = 130
TICK_SECONDS = 0.1
# How long to wait for other nodes if a signal ended the job on this one.
PEER_WAIT_AFTER_SIGNAL = 5.0
MAX_HOSTS_LISTED = 16


@dataclass(frozen=True)
class _JobEnd:
    """The job has ended on this node."""

    # Contains the records that the monitor has read so far.
    run: RunReader
    status: ExitStatus
    seconds: float
    # Number of lines that could not be written to the node log, and the first of them.
    unwritten: int
    unwritten_lines: tuple[tuple[str, bytes], ...]


def run_job(command: Sequence[str], settings: Config, outputs: Outputs) -> int:
    """Run the command under ddpcheck and return the exit status of `ddpcheck run`."""
    folder = make_run_folder(command, out=settings.out, name=settings.name or "", job_id=settings.job_id)
    with metrics_export(settings, folder.name, folder.path) as export:
        return _run_job(command, settings, outputs, folder, export)


def _run_job(
    command: Sequence[str],
    settings: Config,
    outputs: Outputs,
    folder: RunFolder,
    export: MetricsExport | None,
) -> int:
    with exchange_file(folder.path) as exchange:
        config = replace(
            settings,
            run_dir=str(folder.path),
            run_id=folder.run_id,
            exchange_file=str(exchange or ""),
            launcher_host=os.uname().nodename,
            launcher_boot=boot_id(),
        )
        folder = begin_run(folder, command, config)
        end = _run_command(command, config, folder, export)
        own_pids: set[int] = set()
        for each in exchanges_in_use(config):
            end = _log_write_errors(each, folder.path, end)
            own_pids |= {pid for _, pid in heartbeats(each)}
    status = end.status
    log_done(folder.path, status.returncode, status.stop_reason)
    if is_shared(folder.path):
        return _report_with_peers(end, folder, config, outputs, own_pids, export)
    description = finish_run(
        folder,
        status.returncode,
        end.seconds,
        status.stop_reason,
        end.unwritten,
        interrupted=status.interrupted,
    )
    return report_run(
        end.run,
        folder,
        status,
        config,
        outputs,
        description=description,
        unwritten=end.unwritten_lines,
        export=export,
    )


def _run_command(
    command: Sequence[str], config: Config, folder: RunFolder, export: MetricsExport | None
) -> _JobEnd:
    """Run the command until it ends."""
    node_log = NodeLog(folder.path)
    # A job that is stopped at once needs each record at once.
    run = RunReader(folder.path, node_log.host, patience=0.0 if config.fail_fast else PATIENCE_SECONDS)
    sampler = Sampler(folder.path, config.sample_hz)
    started = time.monotonic()
    with live_view(run, folder.name, config.live, config.quiet) as view:
        monitor = RunMonitor(run, node_log, config, sampler, view, export)
        try:
            status = supervise(
                command,
                command_environment(config),
                on_tick=monitor.tick,
                tick_seconds=TICK_SECONDS,
                node_log=node_log,
                screen=view.pane if view is not None else None,
            )
        finally:
            monitor.close()
            node_log.close()
    # After an error the monitor's offsets into the files are unreliable: read them again from the beginning.
    reader = RunReader(folder.path) if monitor.failed else run
    seconds = time.monotonic() - started
    return _JobEnd(reader, status, seconds, node_log.lost + sampler.unwritten, _unwritten_lines(node_log))


def _unwritten_lines(log: NodeLog) -> tuple[tuple[str, bytes], ...]:
    return tuple((log.path.name, line) for line in log.unwritten)


def _log_write_errors(exchange: Path, folder: Path, end: _JobEnd) -> _JobEnd:
    """A rank that cannot write its record file reports that through the shared-memory file.

    Often the launcher cannot write either, so the result contains what it could not write.
    """
    node_log = NodeLog(folder)
    with contextlib.suppress(OSError):
        for rank, pid, text in write_errors(exchange):
            node_log.write("trouble", rank=rank, pid=pid, host=node_log.host, text=text)
    node_log.close()
    lines = (*end.unwritten_lines, *_unwritten_lines(node_log))
    return replace(end, unwritten=end.unwritten + node_log.lost, unwritten_lines=lines)


def _report_with_peers(
    end: _JobEnd,
    folder: RunFolder,
    config: Config,
    outputs: Outputs,
    own_pids: set[int],
    export: MetricsExport | None,
) -> int:
    """Several nodes use this folder: one of them reports, and all exit with the status of its report."""
    run, status = end.run, end.status
    # Whoever ended the job by a signal does not want to wait.
    seconds = config.wait_nodes if status.signal is None else min(config.wait_nodes, PEER_WAIT_AFTER_SIGNAL)
    run.poll()
    if not is_reporter(run, created_run=not folder.joined, own_pids=own_pids):
        report = wait_for_report(folder.path, seconds)
        while report is None and not claim_reporting(folder.path):
            report = wait_for_report(folder.path, seconds)
        if report is not None:
            wait_for_reporter(folder.path)
            if not config.quiet:
                sys.stderr.write(f"ddpcheck: the report of all nodes is {folder.path / REPORT_FILE}\n")
            return _exit_status(status, _fails_by_json(report, config))
        sys.stderr.write("ddpcheck: no other node has reported; this node reports what it can read\n")
    with reporting_heartbeat(folder.path):
        late = wait_for_peers(folder.path, seconds)
        if late:
            sys.stderr.write(
                f"ddpcheck: the launcher on {_host_list(late)} has not ended within {seconds:g} s (--wait-nodes); "
                "reporting without its last records\n"
            )
        ends = [peer for peer in other_launchers(folder.path).values() if peer is not None]
        exit_code = next((code for code in [status.returncode, *(peer.status for peer in ends)] if code), 0)
        stopped = next(
            (reason for reason in [status.stop_reason, *(peer.stopped for peer in ends)] if reason), ""
        )
        description = finish_run(
            folder, exit_code, end.seconds, stopped, end.unwritten, interrupted=status.interrupted
        )
        return report_run(
            run,
            folder,
            status,
            config,
            outputs,
            description=description,
            unwritten=end.unwritten_lines,
            export=export,
        )


def _host_list(hosts: Sequence[str]) -> str:
    more = len(hosts) - MAX_HOSTS_LISTED
    return ", ".join(hosts[:MAX_HOSTS_LISTED]) + (f" and {more} more" if more > 0 else "")


def report_run(
    run: RunReader,
    folder: RunFolder,
    status: ExitStatus,
    config: Config,
    outputs: Outputs,
    *,
    description: dict[str, Any] | None = None,
    unwritten: Sequence[tuple[str, bytes]] = (),
    export: MetricsExport | None = None,
) -> int:
    """Analyse the run, write and show the report, and return the exit status. Errors here must not hide the job's.

    `description`: what run.json should contain; `unwritten`: lines of the log. Neither may have been writable.
    """
    try:
        # The folder may be gone, even where its contents are known.
        description = {**read_description(folder.path), **(description or {})}
        mark = mark_of(folder.path) if "ended" in description else None
        with ReadingProgress(sys.stderr) as progress:
            report = build_report(
                run,
                description,
                course=outputs.need_time_series,
                loss=outputs.need_loss,
                unwritten=unwritten,
                progress=None if config.quiet else progress,
            )
    except RunNotFound:
        sys.stderr.write(
            f"ddpcheck: the run folder {folder.path} no longer exists; there is nothing to report\n"
        )
        return status.returncode or NO_REPORT_STATUS
    except Exception as error:
        sys.stderr.write(
            f"ddpcheck: the records in {folder.path} could not be analysed ({type(error).__name__}: {error}). "
            f"The records are kept. Next: `ddpcheck report {folder.path}`\n"
        )
        # Not 0: without a report, the job must not count as correct.
        return status.returncode or NO_REPORT_STATUS
    write_report(report, folder.path, mark)
    _show(report, page_of(outputs, folder.path), config)
    # To stderr as well: stdout belongs to the job.
    complete = write_outputs(report, outputs, folder.path, sys.stderr)
    if complete and outputs.tensorboard is not None and not config.quiet:
        sys.stderr.write(f"ddpcheck: next: `ddpcheck view {folder.path}` shows this run in TensorBoard\n")
    if export is not None:
        # Now: if a signal ended the command, the next line does not return.
        export.finish(report)
        export.close()
    exit_status = _exit_status(status, _fails(report, config))
    # A CI job that reads a report file must not take a missing file for success.
    return exit_status or (0 if complete else NO_REPORT_STATUS)


def _exit_status(status: ExitStatus, fails: bool) -> int:
    """The exit status of `ddpcheck run`. Does not return if a signal ended the command."""
    if status.stop_reason:
        return FINDINGS_STATUS
    if status.signal is not None:
        exit_like(status)
    if status.returncode:
        # Launchers end with statuses of their own after Ctrl-C: torchrun with 1.
        return INTERRUPTED_STATUS if status.interrupted else status.returncode
    return FINDINGS_STATUS if fails else 0


def _fails(report: Report, config: Config) -> bool:
    complete = None if report.coverage is None else report.coverage.complete
    findings = [(finding.code, finding.severity) for finding in report.findings]
    policy = ExitPolicy(config.fail_on, config.allow_incomplete)
    return policy.fails(findings, is_incomplete(report.verdict, complete))


def _fails_by_json(report: Mapping[str, Any], config: Config) -> bool:
    """The same for a report.json that another node wrote."""
    known = {severity.value for severity in Severity}
    findings = [
        (str(finding.get("code")), Severity(finding["severity"]))
        for finding in report.get("findings", ())
        if finding.get("severity") in known
    ]
    complete = (report.get("coverage") or {}).get("complete")
    policy = ExitPolicy(config.fail_on, config.allow_incomplete)
    return policy.fails(findings, is_incomplete(str(report.get("verdict")), complete))


def _show(report: Report, page: Path | None, config: Config) -> None:
    from rich.console import Console

    from ddpcheck.reports.terminal.report import Detail, render

    console = Console(stderr=True)
    if config.quiet:
        # The job's output may have ended without a newline. Longer reports begin with one.
        console.print()
    render(report, console, page, Detail.requested(verbose=config.verbose, quiet=config.quiet))
