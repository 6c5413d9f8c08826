"""The report on the terminal: the verdict first, then why, then what was looked at."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

from rich.console import Console

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
from ddpcheck.reports.terminal.data import put_data
from ddpcheck.reports.terminal.evidence import put_evidence
from ddpcheck.reports.terminal.hardware import put_hardware, put_links, put_traffic
from ddpcheck.reports.terminal.memory import put_memory
from ddpcheck.reports.terminal.overlap import put_overlap
from ddpcheck.reports.terminal.ranks import put_hosts, rank_table
from ddpcheck.reports.terminal.startup import put_startup
from ddpcheck.reports.terminal.timeseries import put_course
from ddpcheck.reports.terminal.timing import put_time
from ddpcheck.reports.verdict import counted, in_order, verdict_sentence

_MOST_FINDINGS = 10

_VERDICT_STYLES = {
    Verdict.OK: "bold green",
    Verdict.FINDINGS: "bold red",
    Verdict.FAILED: "bold red",
    Verdict.INCOMPLETE: "bold yellow",
}
_SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
_OUTCOME_STYLES = {"agree": "green", "differ": "bold red"}


def render(report: Report, console: Console, page: Path | None = None) -> None:
    """Write `report` to `console`; `page` is where it can be looked at in a browser."""
    ink = ReportConsole(console)
    ink.put(ink.text(verdict_sentence(report), _VERDICT_STYLES[report.verdict]))
    _findings(ink, report)
    _ranks(ink, report)
    put_data(ink, report)
    put_traffic(ink, report)
    put_links(ink, report)
    put_hardware(ink, report)
    put_time(ink, report)
    put_course(ink, report)
    put_startup(ink, report)
    put_memory(ink, report)
    put_overlap(ink, report)
    put_hosts(ink, report)
    _checks(ink, report)
    _next(ink, report, page)


def render_outcome(report: Report, console: Console) -> None:
    """The verdict, a line for each finding, and where the rest is."""
    ink = ReportConsole(console)
    ink.gap()
    ink.put(ink.text(verdict_sentence(report), _VERDICT_STYLES[report.verdict]))
    for finding in in_order(report)[:_MOST_FINDINGS]:
        heading = ink.text(f"{finding.severity.value} {finding.code}", _SEVERITY_STYLES[finding.severity])
        ink.put(heading.append(ink.text(f"  {finding.title}")), indent=2)
    _next(ink, report, None)


def _findings(ink: ReportConsole, report: Report) -> None:
    ordered = in_order(report)
    several_attempts = len(report.attempts) > 1
    for finding in ordered[:_MOST_FINDINGS]:
        ink.gap()
        _finding(ink, finding, several_attempts)
    left_out = ordered[_MOST_FINDINGS:]
    if left_out:
        ink.gap()
        codes = Counter(finding.code for finding in left_out)
        counts = ", ".join(f"{code} x{number}" if number > 1 else code for code, number in codes.items())
        ink.put(ink.text(f"and {counted(len(left_out), 'more finding')}, all in report.json: {counts}"))


def _finding(ink: ReportConsole, finding: Finding, several_attempts: bool) -> None:
    heading = ink.text(f"{finding.severity.value} {finding.code}", _SEVERITY_STYLES[finding.severity])
    ink.put(heading.append(ink.text(f"  {finding.title}", LABEL)))
    place = _place(finding, several_attempts)
    if place:
        ink.put(ink.text(place, QUIET), indent=2)
    if finding.message and finding.message != finding.title:
        ink.put(ink.text(finding.message), indent=2)
    put_evidence(ink, finding.evidence, indent=2)
    advice = [
        (label, ink.text(said)) for label, said in (("why", finding.cause), ("fix", finding.fix)) if said
    ]
    if advice:
        ink.gap()
        ink.put(ink.labelled(advice), indent=2)


def _place(finding: Finding, several_attempts: bool) -> str:
    parts = [
        f"attempt {finding.attempt}" if several_attempts else "",
        "" if finding.step is None else f"step {finding.step}",
        f"stage {finding.stage}" if finding.stage else "",
        f"module {finding.module}" if finding.module else "",
        f"parameter {finding.parameter}" if finding.parameter else "",
        name_ranks(finding.ranks) if finding.ranks else "",
    ]
    return ", ".join(part for part in parts if part)


def _ranks(ink: ReportConsole, report: Report) -> None:
    for attempt in report.attempts:
        if not attempt.ranks:
            continue
        ink.gap()
        size = f"{counted(attempt.world_size, 'rank')}, {counted(attempt.steps, 'step')}"
        which = f"Ranks, attempt {attempt.number}: {size}" if len(report.attempts) > 1 else "Ranks"
        ink.put(ink.text(which, LABEL), indented(rank_table(ink, attempt)))


def _checks(ink: ReportConsole, report: Report) -> None:
    if not report.checks:
        return
    ink.gap()
    rows = [
        (check.name, ink.text(check.outcome, _OUTCOME_STYLES.get(check.outcome, "yellow")), check.detail)
        for check in report.checks
    ]
    ink.put(ink.text("Checked", LABEL), indented(ink.columns(["", "", ""], rows)))


def _next(ink: ReportConsole, report: Report, page: Path | None) -> None:
    path = str(report.run.get("path") or "")
    codes = list(dict.fromkeys(finding.code for finding in in_order(report)))
    rows = [("run folder", ink.text(path))] if path else []
    rows += [("page", ink.text(page))] if page else []
    commands = [f"ddpcheck explain {code}" for code in codes[:1]]
    commands += [f"ddpcheck report {shlex.quote(path)}"] if path else []
    labels = ["type next", ""]
    rows += [(label, ink.text(command)) for label, command in zip(labels, commands, strict=False)]
    if rows:
        ink.gap()
        ink.put(ink.labelled(rows))
