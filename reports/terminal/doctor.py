"""What the doctor found, on the terminal: what is wrong first and in words, what is well in a line each."""

from __future__ import annotations

import io
from typing import TextIO

from rich.console import Console
from rich.text import Text

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.diagnosis import LEVELS, Diagnosis
from ddpcheck.doctor.model import DoctorReport
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
    ink = ReportConsole(console)
    ink.put(ink.text(_headline(report), LABEL), ink.text(_about(report), QUIET))
    for level in (Severity.ERROR, Severity.WARNING, Severity.NOTE):
        found = [one for one in report.diagnoses if one.severity is level and not one.passed]
        for one in found[:_MOST_OF_A_LEVEL]:
            ink.gap()
            _put(ink, report, one)
        if len(found) > _MOST_OF_A_LEVEL:
            ink.put(
                ink.text(f"{len(found) - _MOST_OF_A_LEVEL} more of this level are in --json", QUIET), indent=2
            )
    well: dict[str, list[Diagnosis]] = {}
    for one in report.diagnoses:
        if one.passed:
            well.setdefault(one.code, []).append(one)
    if well:
        ink.gap()
        rows = [[ink.text("ok", "green"), check, _line(some)] for check, some in well.items()]
        ink.put(ink.columns(["", "", ""], rows))


def as_text(report: DoctorReport, stream: TextIO) -> str:
    """For whoever writes it out at once, such as one rank of many; without colour."""
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
    told = [f"{count} {LEVELS[level]}{'' if count == 1 else 's'}" for level, count in counts if count]
    return ", ".join(told) if told else "No problems"


def _about(report: DoctorReport) -> str:
    context = report.context
    if context.world_size is None:
        return f"this machine, {context.facts[0].host}"
    hosts = context.hosts
    named = [f"{host.name} ({_ranks(host.ranks)})" for host in hosts[:_MOST_HOSTS]]
    more = f" and {len(hosts) - _MOST_HOSTS} more hosts" if len(hosts) > _MOST_HOSTS else ""
    return f"{', '.join(named)}{more}"


def _put(ink: ReportConsole, report: DoctorReport, one: Diagnosis) -> None:
    head = Text.assemble((f"{one.level.upper()}  ", _STYLES[one.severity]), ink.text(one.message))
    head.overflow = "fold"
    rows = [("where", ink.text(_where(report, one)))] if _where(report, one) else []
    rows += [("why", ink.text(one.cause))] if one.cause else []
    rows += [("do", ink.text(one.fix))] if one.fix else []
    ink.put(head, indented(ink.labelled(rows)))


def _line(some: list[Diagnosis]) -> str:
    """One line for all hosts, which are well in different words."""
    first, *more = some
    return (
        f"{first.message} on {first.hosts[0]}; {len(more)} more in --json"
        if more and first.hosts
        else first.message
    )


def _where(report: DoctorReport, one: Diagnosis) -> str:
    """Nothing where it holds for all that there is."""
    hosts, ranks = report.context.hosts, set(one.ranks)
    everybody = {rank for host in hosts for rank in host.ranks}
    if not one.hosts and not ranks:
        return ""
    if len(one.hosts) == len(hosts) > 1 and (not ranks or ranks == everybody):
        return "all hosts"
    if not one.hosts or len(hosts) == 1:
        return _ranks(one.ranks) if ranks and ranks != everybody else ""
    shown = ", ".join(one.hosts[:_MOST_HOSTS])
    more = f" and {len(one.hosts) - _MOST_HOSTS} more" if len(one.hosts) > _MOST_HOSTS else ""
    return f"{shown}{more}" + (f" ({_ranks(one.ranks)})" if ranks else "")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {rank_ranges(ranks)}"
