"""The head of the page, and the findings with their evidence, cause and fix."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.finding_text import script_line, source_line
from ddpcheck.reports.html.components import Html, joined, rows_table, table, tag
from ddpcheck.reports.safe_text import shortened
from ddpcheck.reports.verdict import counted, in_order, leading_finding, verdict_sentence
from ddpcheck.reports.views.evidence import (
    Block,
    Line,
    Names,
    RankValues,
    Records,
    Stacks,
    column_label,
    evidence_blocks,
    outlier_flags,
)
from ddpcheck.reports.views.key_figures import key_figures
from ddpcheck.reports.views.summary import SummaryLine, summary_lines
from ddpcheck.reports.views.table import Table

# report.json has all findings.
_MOST_FINDINGS = 60
_MOST_COLUMNS = 16
_MOST_ROWS = 40
_MOST_GROUPS = 24
_MOST_CALLS = 12
_MOST_CHARACTERS = 2000


def head(report: Report) -> tuple[str, Html]:
    """The title of the page, and its head: verdict, what to do next, six figures, and what the run was."""
    sentence = verdict_sentence(report)
    name = str(report.run.get("name") or "")
    box = tag(
        "div",
        tag("p", _status(report), class_="status"),
        tag("h1", sentence),
        _next(report),
        class_=f"verdict {_mark(report)}",
    )
    parts = [box, _figures(report), _facts(report, name), _summary(report)]
    return f"{sentence} - {name}" if name else sentence, joined(parts)


_STATUS = {
    Verdict.OK: "replicas agree",
    Verdict.FINDINGS: "findings",
    Verdict.FAILED: "the job failed",
    Verdict.INCOMPLETE: "incomplete",
}


def _status(report: Report) -> str:
    """The verdict as report.json has it, with the number of findings by severity."""
    counts = [
        counted(number, severity.value)
        for severity in sorted(Severity, key=lambda each: -each.weight)
        if (number := sum(finding.severity is severity for finding in report.findings))
    ]
    status = _STATUS[report.verdict] if report.findings or report.world_size > 1 else report.verdict.value
    return ", ".join([status, *counts])


def _next(report: Report) -> Html | None:
    """The line of the program that the verdict is about, and the next command."""
    lead = leading_finding(report)
    if lead is None or lead.severity is Severity.NOTE:
        return None
    location = _source_line(report, lead)
    parts: list[object] = [tag("code", location), Html("<br>")] if location else []
    return tag("p", *parts, "Next: ", tag("code", f"ddpcheck explain {lead.code}"))


def _figures(report: Report) -> Html:
    tiles = [
        tag(
            "div",
            tag("dt", figure.label),
            tag(
                "dd",
                figure.value,
                class_=" ".join(filter(None, ("value", figure.mark and figure.mark.value))),
            ),
            tag("dd", figure.detail, class_="quiet"),
        )
        for figure in key_figures(report)
    ]
    return tag("dl", *tiles, class_="figures", aria_label="Key figures")


def _facts(report: Report, name: str) -> Html:
    facts = [
        ("run", name),
        ("ranks", f"{report.world_size:,}"),
        ("steps", f"{report.steps:,}"),
        ("exit status", "unknown" if report.exit_code is None else str(report.exit_code)),
        ("started", _minute(report.run.get("started"))),
        ("duration", _duration(report.run.get("seconds"))),
        ("torch", ", ".join(map(str, report.run.get("torch") or ()))),
    ]
    rows = [tag("div", tag("dt", label), tag("dd", value)) for label, value in facts if value]
    command = tag("dd", tag("code", shlex.join(report.command)))
    rows.append(tag("div", tag("dt", "command"), command, class_="wide"))
    return tag("dl", *rows, class_="facts")


def _mark(report: Report) -> str:
    """The verdict is coloured by the worst finding."""
    ordered = in_order(report)
    only_warnings = report.verdict is Verdict.FINDINGS and ordered and ordered[0].severity is Severity.WARNING
    return Severity.WARNING.value if only_warnings else report.verdict.value


def _summary(report: Report) -> Html | None:
    """The lines of the summary on the terminal. Lines without a label continue the one before."""
    entries: list[tuple[SummaryLine, list[SummaryLine]]] = []
    for line in summary_lines(report):
        if line.label or not entries:
            entries.append((line, []))
        else:
            entries[-1][1].append(line)
    rows = [
        tag(
            "div",
            tag("dt", first.label),
            *(tag("dd", each.text, class_=each.mark.value if each.mark else None) for each in (first, *more)),
        )
        for first, more in entries
    ]
    lines = tag("dl", *rows, class_="summary", aria_label="Summary")
    return (
        tag("details", tag("summary", "Summary, as on the terminal"), lines, class_="terminal")
        if rows
        else None
    )


def _minute(started: object) -> str:
    """Date and minute; report.json has the seconds."""
    day, _, rest = str(started or "").partition("T")
    zone = rest[-6:] if rest[-6:-5] in ("+", "-") else ""
    return f"{day} {rest[:5]} {'UTC' if zone == '+00:00' else zone}".strip() if rest else day


def _duration(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def section(report: Report) -> Html | None:
    ordered = in_order(report)
    if not ordered:
        return tag("p", "None.")
    several = len(report.attempts) > 1
    cards = [_card(finding, several, _source_line(report, finding)) for finding in ordered[:_MOST_FINDINGS]]
    more = len(ordered) - _MOST_FINDINGS
    rest = tag("p", f"and {more} more, in report.json") if more > 0 else None
    return joined([tag("div", *cards, class_="cards"), rest])


def _source_line(report: Report, finding: Finding) -> str:
    file, line = script_line(report, finding)
    return f"{file}:{line}  {source_line(file, line)}".rstrip() if line else ""


def _card(finding: Finding, several_attempts: bool, location: str) -> Html:
    heading = tag(
        "h3", tag("span", f"{finding.severity.value} {finding.code}", class_="badge"), " ", finding.title
    )
    message = tag("p", finding.message) if finding.message != finding.title else None
    advice = [
        joined([tag("dt", label), tag("dd", text)])
        for label, text in (("why", finding.cause), ("fix", finding.fix))
        if text
    ]
    explain = tag("p", "More: ", tag("code", f"ddpcheck explain {finding.code}"), class_="quiet")
    return tag(
        "article",
        heading,
        tag("p", _location(finding, several_attempts, location), class_="quiet"),
        message,
        tag("dl", *advice, class_="advice") if advice else None,
        explain,
        _evidence_of(finding),
        class_=f"finding {finding.severity.value}",
    )


def _evidence_of(finding: Finding) -> Html | None:
    """Open under errors; what a warning or a note is based on, is behind a click."""
    shown = evidence(finding.evidence, finding.ranks)
    if shown is None:
        return None
    opened = "" if finding.severity is Severity.ERROR else None
    return tag("details", tag("summary", "Evidence"), shown, open=opened)


def _location(finding: Finding, several_attempts: bool, in_program: str) -> Html:
    parts: list[object] = []
    parts += [f"attempt {finding.attempt}"] if several_attempts else []
    parts += [f"step {finding.step}"] if finding.step is not None else []
    parts += [f"stage {finding.stage}"] if finding.stage else []
    parts += [f"module {finding.module}"] if finding.module else []
    parts += [joined(["parameter ", tag("code", finding.parameter)])] if finding.parameter else []
    parts += [name_ranks(finding.ranks)] if finding.ranks else []
    parts += [joined(["at ", tag("code", in_program)])] if in_program else []
    return joined([item for part in parts for item in (", ", part)][1:])


def evidence(pieces: Mapping[str, Any], outliers: Collection[int]) -> Html | None:
    """One block for each piece of evidence."""
    blocks = [_rendered(block) for block in evidence_blocks(pieces, outliers)]
    return tag("div", *blocks, class_="evidence") if blocks else None


def _rendered(block: Block) -> Html:
    if isinstance(block, Line):
        return tag("p", shortened(block.text, _MOST_CHARACTERS))
    if isinstance(block, Names):
        names = [item for name in block.names for item in (", ", tag("code", name))][1:]
        return tag("p", f"{block.heading} ", *names, f" and {block.more} more" if block.more else "")
    if isinstance(block, Records):
        return _table(block.table, _MOST_ROWS)
    if isinstance(block, RankValues):
        return joined([tag("p", block.heading), _side_by_side(block)])
    if isinstance(block, Stacks):
        return _stacks(block)
    return _table(block, _MOST_GROUPS)


def _table(view: Table, most: int) -> Html:
    more = len(view.rows) - most
    return joined(
        [
            tag("p", view.title),
            rows_table(view, view.rows[:most]),
            tag("p", f"and {more} more {view.noun}") if more > 0 else None,
        ]
    )


def _side_by_side(block: RankValues) -> Html:
    """One column for each rank, or for each group of ranks with equal values where there are many."""
    groups = [[rank] for rank in block.ranks]
    if len(groups) > _MOST_COLUMNS:
        groups = block.equal_ranks()
    shown = groups[:_MOST_COLUMNS]
    more = sum(map(len, groups[_MOST_COLUMNS:]))
    headers = [block.corner, *map(column_label, shown), *([f"({more} more ranks)"] if more else [])]
    rows = [
        [tag("th", label, scope="row"), *_cells(shown, by_rank)] for label, by_rank in block.rows[:_MOST_ROWS]
    ]
    return table(headers, rows, f"{block.corner.capitalize()}s by rank", numbers=range(1, len(headers)))


def _cells(groups: list[list[str]], by_rank: Mapping[str, str]) -> list[Html]:
    texts = [by_rank.get(group[0], "-") for group in groups]
    flags = outlier_flags(groups, texts)
    return [
        tag("td", text, class_="number error" if outlier else "number")
        for text, outlier in zip(texts, flags, strict=True)
    ]


def _stacks(block: Stacks) -> Html:
    rows = [
        [
            rank_ranges(group.ranks),
            group.step,
            group.state,
            tag("td", *(tag("code", call, Html("<br>")) for call in group.calls[:_MOST_CALLS])),
        ]
        for group in block.groups[:_MOST_GROUPS]
    ]
    headers = ("ranks", "step", "state", "stack")
    return tag("details", tag("summary", block.heading.rstrip(":")), table(headers, rows, "Stacks"))
