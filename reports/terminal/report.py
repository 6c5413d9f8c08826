"""The report on the terminal: findings, a summary, and last the verdict with what to do next."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.reports.finding_text import finding_location, script_line, short_path, source_line
from ddpcheck.reports.terminal.charts import overlap_bar, overlap_legend, print_series, step_bar, step_legend
from ddpcheck.reports.terminal.console import LABEL, MARK_STYLES, QUIET, ReportConsole
from ddpcheck.reports.terminal.evidence import print_evidence
from ddpcheck.reports.verdict import counted, in_order, leading_finding, verdict_sentence
from ddpcheck.reports.views import cost, data, hardware, memory, ranks, timing
from ddpcheck.reports.views.summary import summary_lines
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


class Detail(Enum):
    """How much of a report is printed."""

    OUTCOME = "outcome"  # the last lines only
    SUMMARY = "summary"  # findings, a line for each subject, the outcome
    ALL = "all"  # with every table

    @classmethod
    def requested(cls, *, verbose: bool, quiet: bool) -> Detail:
        return cls.ALL if verbose else cls.OUTCOME if quiet else cls.SUMMARY


def render(
    report: Report, console: Console, page: Path | None = None, detail: Detail = Detail.SUMMARY
) -> None:
    """Write `report` to `console`; `page` is the path of the HTML page, if one was written.

    The outcome comes last, where the prompt of a terminal is.
    """
    out = ReportConsole(console)
    if detail is not Detail.OUTCOME:
        _print_findings(out, report, detail)
        if detail is Detail.ALL:
            _print_tables(out, report)
        _print_summary(out, report)
        out.gap()
    _print_outcome(out, report, page)


def render_outcome(report: Report, console: Console) -> None:
    """A line for each finding, then the outcome."""
    out = ReportConsole(console)
    out.gap()
    for finding in in_order(report)[:_MOST_FINDINGS]:
        heading = out.text(f"{finding.severity.value} {finding.code}", _SEVERITY_STYLES[finding.severity])
        out.put(heading.append(out.text(f"  {finding.title}")), indent=2)
    _print_outcome(out, report, None)


def _print_tables(out: ReportConsole, report: Report) -> None:
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


def _print_summary(out: ReportConsole, report: Report) -> None:
    lines = summary_lines(report)
    if not lines:
        return
    out.gap()
    out.put(out.text("Summary", LABEL))
    rows = [
        (line.label, out.text(line.text, "" if line.mark is None else MARK_STYLES[line.mark]))
        for line in lines
    ]
    out.put(out.labelled(rows, style=QUIET), indent=2)


def _print_outcome(out: ReportConsole, report: Report, page: Path | None) -> None:
    """The verdict with the line of the program it is about, then what to do next and where the report is."""
    verdict = out.text(verdict_sentence(report), verdict_style(report))
    location = _source_location(report)
    if location:
        joined = Text.assemble(verdict, "  ", out.text(location, QUIET))
        if joined.cell_len <= out.console.width:
            out.put(joined)
        else:
            out.put(verdict)
            out.put(out.text(location, QUIET), indent=2)
    else:
        out.put(verdict)
    rows = [(label, out.text(text)) for label, text in _next_steps(report, page)]
    joined = Text("   ").join(Text.assemble((label, LABEL), " ", text) for label, text in rows)
    if joined.cell_len <= out.console.width:
        out.put(joined)
    elif rows:
        out.put(out.labelled(rows))


def verdict_style(report: Report) -> str:
    """The colour of the worst finding; without findings, that of the verdict."""
    if report.verdict in {Verdict.OK, Verdict.FINDINGS} and report.findings:
        worst = in_order(report)[0].severity
        if worst is not Severity.NOTE:
            return _SEVERITY_STYLES[worst]
    return _VERDICT_STYLES[report.verdict]


def _source_location(report: Report) -> str:
    """`train.py:41  loss = model(batch)`: the line that the leading finding is about."""
    lead = leading_finding(report)
    if lead is None or lead.severity is Severity.NOTE:
        return ""
    file, number = script_line(report, lead)
    if number is None:
        return ""
    source = source_line(file, number)
    return f"{short_path(file)}:{number}" + (f"  {source}" if source else "")


def _next_steps(report: Report, page: Path | None) -> list[tuple[str, str]]:
    path = str(report.run.get("path") or "")
    lead = leading_finding(report)
    quoted = shlex.quote(short_path(path)) if path else ""
    if lead is not None and lead.severity is not Severity.NOTE:
        command = f"ddpcheck explain {lead.code}"
    else:
        command = f"ddpcheck report {quoted} -v" if path else ""
    rows = [("Next:", command)] if command else []
    if page is not None:
        rows.append(("Page:", short_path(str(page))))
    elif path and path not in command:
        rows.append(("Run:", short_path(path)))
    return rows


def _print_findings(out: ReportConsole, report: Report, detail: Detail) -> None:
    ordered = in_order(report)
    several_attempts = len(report.attempts) > 1
    for finding in ordered[:_MOST_FINDINGS]:
        out.gap()
        # What a note is based on is rarely of interest.
        evidence = detail is Detail.ALL or finding.severity is not Severity.NOTE
        _print_finding(out, finding, several_attempts, evidence)
    rest = ordered[_MOST_FINDINGS:]
    if rest:
        out.gap()
        codes = Counter(finding.code for finding in rest)
        counts = ", ".join(f"{code} x{number}" if number > 1 else code for code, number in codes.items())
        out.put(out.text(f"and {counted(len(rest), 'more finding')}, all in report.json: {counts}"))


def _print_finding(out: ReportConsole, finding: Finding, several_attempts: bool, evidence: bool) -> None:
    heading = out.text(f"{finding.severity.value} {finding.code}", _SEVERITY_STYLES[finding.severity])
    out.put(heading.append(out.text(f"  {finding.title}", LABEL)))
    location = finding_location(finding, several_attempts)
    if location:
        out.put(out.text(location, QUIET), indent=2)
    if finding.message and finding.message != finding.title:
        out.put(out.text(finding.message), indent=2)
    advice = [
        (label, out.text(text)) for label, text in (("why", finding.cause), ("fix", finding.fix)) if text
    ]
    if advice:
        out.put(out.labelled(advice), indent=2)
    if evidence:
        print_evidence(out, finding.evidence, indent=2, outliers=finding.ranks)


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
