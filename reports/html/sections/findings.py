"""Findings, the gravest first, each with its evidence, its likely cause and the fix."""

from __future__ import annotations

from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.html.evidence import evidence
from ddpcheck.reports.html.markup import Html, joined, tag
from ddpcheck.reports.html.material import Material
from ddpcheck.reports.script_line import script_line
from ddpcheck.reports.verdict import in_order

# All of them are in report.json; a page of hundreds is read by nobody.
_MOST = 60


def section(made: Material) -> Html | None:
    ordered = in_order(made.report)
    if not ordered:
        return tag("p", "None.")
    several = len(made.report.attempts) > 1
    cards = [_card(finding, several, _line(made, finding)) for finding in ordered[:_MOST]]
    left_out = len(ordered) - _MOST
    more = tag("p", f"and {left_out} more, in report.json") if left_out > 0 else None
    return joined([*cards, more])


def _line(made: Material, finding: Finding) -> str:
    file, line = script_line(made.report, finding)
    return f"{file}:{line}" if line else ""


def _card(finding: Finding, several_attempts: bool, line: str) -> Html:
    heading = tag(
        "h3", tag("span", f"{finding.severity.value} {finding.code}", class_="badge"), " ", finding.title
    )
    message = tag("p", finding.message) if finding.message != finding.title else None
    advice = [
        joined([tag("dt", label), tag("dd", said)])
        for label, said in (("why", finding.cause), ("fix", finding.fix))
        if said
    ]
    explain = tag("p", "More: ", tag("code", f"ddpcheck explain {finding.code}"), class_="quiet")
    return tag(
        "article",
        heading,
        tag("p", _place(finding, several_attempts, line), class_="quiet"),
        message,
        evidence(finding.evidence, finding.ranks),
        tag("dl", *advice, class_="advice") if advice else None,
        explain,
        class_=f"finding {finding.severity.value}",
    )


def _place(finding: Finding, several_attempts: bool, line: str) -> Html:
    parts: list[object] = []
    if several_attempts:
        parts.append(f"attempt {finding.attempt}")
    if finding.step is not None:
        parts.append(f"step {finding.step}")
    parts += [f"stage {finding.stage}"] if finding.stage else []
    parts += [f"module {finding.module}"] if finding.module else []
    parts += [joined(["parameter ", tag("code", finding.parameter)])] if finding.parameter else []
    parts += [name_ranks(finding.ranks)] if finding.ranks else []
    parts += [joined(["at ", tag("code", line)])] if line else []
    return joined([item for part in parts for item in (", ", part)][1:])
