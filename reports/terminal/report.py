"""The report on the terminal: the verdict, the findings, then the tables."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.reports.finding_text import finding_location
from ddpcheck.reports.terminal.charts import overlap_bar, overlap_legend, print_series, step_bar, step_legend
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole
from ddpcheck.reports.terminal.evidence import print_evidence
from ddpcheck.reports.verdict import counted, in_order, verdict_sentence
from ddpcheck.reports.views import cost, data, hardware, memory, ranks, timing
from ddpcheck.reports.views.table import Table

_MOST_FINDINGS = 10
_MOST_GPUS = 16
_MOST_CHECKS = 64
# The width of a step's bar on 80 columns, and the most on a wider terminal.
_STEP_BAR = 20
_LONG_STEP_BAR = 40
_OVERLAP_BAR = 24

_VERDICT_STYLES = {
    Verdict.OK: "bold green",
    Verdict.FINDINGS: "bold red",
    Verdict.FAILED: "bold red",
    Verdict.INCOMPLETE: "bold yellow",
}
_SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


def render(report: Report, console: Console, page: Path | None = None) -> None:
    """Write `report` to `console`; `page` is the path of the HTML page, if one was written."""
    out = ReportConsole(console)
    out.put(out.text(verdict_sentence(report), _VERDICT_STYLES[report.verdict]))
    _print_findings(out, report)
    for table in ranks.rank_tables(report):
        out.table(table, most=ranks.MOST_GROUPS)
    out.table(data.data_table(report))
    out.table(hardware.traffic_table(report))
    out.table(hardware.link_table(report))
    out.table(hardware.port_table(report))
    out.table(hardware.node_table(report))
    out.table(hardware.gpu_table(report), most=_MOST_GPUS)
    _print_step_times(out, report)
    print_series(out, report)
    out.table(timing.startup_table(report))
    out.table(memory.memory_table(report))
    _print_overlap(out, report)
    out.table(ranks.host_table(report))
    out.table(ranks.check_table(report), most=_MOST_CHECKS)
    _print_next(out, report, page)


def render_outcome(report: Report, console: Console) -> None:
    """The verdict, a line for each finding, and the next commands."""
    out = ReportConsole(console)
    out.gap()
    out.put(out.text(verdict_sentence(report), _VERDICT_STYLES[report.verdict]))
    for finding in in_order(report)[:_MOST_FINDINGS]:
        heading = out.text(f"{finding.severity.value} {finding.code}", _SEVERITY_STYLES[finding.severity])
        out.put(heading.append(out.text(f"  {finding.title}")), indent=2)
    _print_next(out, report, None)


def _print_findings(out: ReportConsole, report: Report) -> None:
    ordered = in_order(report)
    several_attempts = len(report.attempts) > 1
    for finding in ordered[:_MOST_FINDINGS]:
        out.gap()
        _print_finding(out, finding, several_attempts)
    rest = ordered[_MOST_FINDINGS:]
    if rest:
        out.gap()
        codes = Counter(finding.code for finding in rest)
        counts = ", ".join(f"{code} x{number}" if number > 1 else code for code, number in codes.items())
        out.put(out.text(f"and {counted(len(rest), 'more finding')}, all in report.json: {counts}"))


def _print_finding(out: ReportConsole, finding: Finding, several_attempts: bool) -> None:
    heading = out.text(f"{finding.severity.value} {finding.code}", _SEVERITY_STYLES[finding.severity])
    out.put(heading.append(out.text(f"  {finding.title}", LABEL)))
    location = finding_location(finding, several_attempts)
    if location:
        out.put(out.text(location, QUIET), indent=2)
    if finding.message and finding.message != finding.title:
        out.put(out.text(finding.message), indent=2)
    print_evidence(out, finding.evidence, indent=2, outliers=finding.ranks)
    advice = [
        (label, out.text(text)) for label, text in (("why", finding.cause), ("fix", finding.fix)) if text
    ]
    if advice:
        out.gap()
        out.put(out.labelled(advice), indent=2)


def _print_step_times(out: ReportConsole, report: Report) -> None:
    width = min(max(out.console.width - 80, 0) + _STEP_BAR, _LONG_STEP_BAR)
    for times in timing.step_times(report):
        bars = {
            rank: step_bar(_by_phase(phases), times.longest_ms, width)
            for rank, phases in times.phases_ms.items()
        }
        _print_with_bars(out, times.table, bars)
    lines = cost.cost_lines(report)
    if lines:
        out.gap()
        out.put(*map(out.text, lines))


def _print_with_bars(out: ReportConsole, table: Table, bars: Mapping[int, Text]) -> None:
    out.table(table, bar=lambda row: bars[row.ranks[0]], bar_label=step_legend(all_phases=False))


def _by_phase(phases: tuple[float, ...]) -> dict[str, float]:
    return {phase: value for (phase, _, _), value in zip(timing.PHASES, phases, strict=True)}


def _print_overlap(out: ReportConsole, report: Report) -> None:
    profiled = timing.profiled_overlap(report)
    if profiled is None:
        return
    longest, shares = profiled.longest_ns, profiled.shares
    out.table(
        profiled.ranks,
        bar=lambda row: overlap_bar(shares[row.ranks[0]], longest, _OVERLAP_BAR),
        bar_legend=overlap_legend(),
    )


def _print_next(out: ReportConsole, report: Report, page: Path | None) -> None:
    path = str(report.run.get("path") or "")
    codes = list(dict.fromkeys(finding.code for finding in in_order(report)))
    rows = [("Run folder:", out.text(path))] if path else []
    rows += [("Page:", out.text(page))] if page else []
    commands = [f"ddpcheck explain {code}" for code in codes[:1]]
    commands += [f"ddpcheck report {shlex.quote(path)}"] if path else []
    rows += [(label, out.text(command)) for label, command in zip(("Next:", ""), commands, strict=False)]
    if rows:
        out.gap()
        out.put(out.labelled(rows))
