"""The report of `ddpcheck doctor` on the terminal: problems first, then one line for each check that passed."""

from __future__ import annotations

import io
from typing import TextIO

from rich.console import Console
from rich.text import Text

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.model import LEVELS, Diagnosis, DoctorReport
from ddpcheck.formatting import rank_ranges
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented

_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.NOTE: "bold cyan",
}
_MOST_HOSTS = 6
_MOST_OF_A_LEVEL = 20


def render(report: DoctorReport, console: Console) -> None:
    """Write `report` to `console`."""
    out = ReportConsole(console)
    out.put(out.text(_headline(report), LABEL), out.text(_about(report), QUIET))
    for level in (Severity.ERROR, Severity.WARNING, Severity.NOTE):
        diagnoses = [each for each in report.diagnoses if each.severity is level and not each.passed]
        for diagnosis in diagnoses[:_MOST_OF_A_LEVEL]:
            out.gap()
            _print_diagnosis(out, report, diagnosis)
        if len(diagnoses) > _MOST_OF_A_LEVEL:
            out.put(
                out.text(f"and {len(diagnoses) - _MOST_OF_A_LEVEL} more of this level, in --json", QUIET),
                indent=2,
            )
    passed: dict[str, list[Diagnosis]] = {}
    for diagnosis in report.diagnoses:
        if diagnosis.passed:
            passed.setdefault(diagnosis.code, []).append(diagnosis)
    if passed:
        out.gap()
        rows = [[out.text("ok", "green"), check, _line(some)] for check, some in passed.items()]
        out.put(out.columns(["", "", ""], rows))


def as_text(report: DoctorReport, stream: TextIO) -> str:
    """The report as text without colours, for one rank of many that writes it in one piece."""
    text = io.StringIO()
    ascii_only = not (stream.encoding or "").lower().startswith("utf")
    console = Console(file=text, width=80, legacy_windows=False, no_color=True, safe_box=True)
    render(report, console)
    shown = text.getvalue()
    return shown.encode("ascii", "replace").decode("ascii") if ascii_only else shown


def _headline(report: DoctorReport) -> str:
    counts = [
        (level, sum(one.severity is level and not one.passed for one in report.diagnoses))
        for level in (Severity.ERROR, Severity.WARNING, Severity.NOTE)
    ]
    counted = [f"{count} {LEVELS[level]}{'' if count == 1 else 's'}" for level, count in counts if count]
    return ", ".join(counted) if counted else "No problems found"


def _about(report: DoctorReport) -> str:
    context = report.context
    if context.world_size is None:
        return f"this machine, {context.facts[0].host}"
    hosts = context.hosts
    named = [f"{host.name} ({_ranks(host.ranks)})" for host in hosts[:_MOST_HOSTS]]
    more = f" and {len(hosts) - _MOST_HOSTS} more hosts" if len(hosts) > _MOST_HOSTS else ""
    return f"{', '.join(named)}{more}"


def _print_diagnosis(out: ReportConsole, report: DoctorReport, one: Diagnosis) -> None:
    head = Text.assemble((f"{one.level.upper()}  ", _STYLES[one.severity]), out.text(one.message))
    head.overflow = "fold"
    rows = [("where", out.text(_where(report, one)))] if _where(report, one) else []
    rows += [("why", out.text(one.cause))] if one.cause else []
    rows += [("fix", out.text(one.fix))] if one.fix else []
    out.put(head, indented(out.labelled(rows)))


def _line(some: list[Diagnosis]) -> str:
    """One line for all hosts, with the text of the first."""
    first, *more = some
    return (
        f"{first.message} on {first.hosts[0]}; {len(more)} more in --json"
        if more and first.hosts
        else first.message
    )


def _where(report: DoctorReport, one: Diagnosis) -> str:
    """Hosts and ranks; empty if it holds for all of them."""
    hosts, ranks = report.context.hosts, set(one.ranks)
    all_ranks = {rank for host in hosts for rank in host.ranks}
    if not one.hosts and not ranks:
        return ""
    if len(one.hosts) == len(hosts) > 1 and (not ranks or ranks == all_ranks):
        return "all hosts"
    if not one.hosts or len(hosts) == 1:
        return _ranks(one.ranks) if ranks and ranks != all_ranks else ""
    shown = ", ".join(one.hosts[:_MOST_HOSTS])
    more = f" and {len(one.hosts) - _MOST_HOSTS} more" if len(one.hosts) > _MOST_HOSTS else ""
    return f"{shown}{more}" + (f" ({_ranks(one.ranks)})" if ranks else "")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {rank_ranges(ranks)}"
