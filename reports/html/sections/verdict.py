"""The head of the page: the verdict in one sentence, and what was watched."""

from __future__ import annotations

import shlex

from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, tag
from ddpcheck.reports.verdict import counted, verdict_sentence


def section(made: PageContext) -> tuple[str, Html]:
    """The title of the page, and its head."""
    report = made.report
    sentence = verdict_sentence(report)
    name = str(report.run.get("name") or "")
    facts = [
        ("run", name),
        ("ranks", counted(report.world_size, "rank")),
        ("steps", counted(report.steps, "step")),
        ("exit status of the command", "not known" if report.exit_code is None else str(report.exit_code)),
        ("started", _moment(report.run.get("started"))),
        ("took", _seconds(report.run.get("seconds"))),
        ("torch", ", ".join(map(str, report.run.get("torch") or ()))),
    ]
    rows = [tag("div", tag("dt", label), tag("dd", said)) for label, said in facts if said]
    command = tag("dd", tag("code", shlex.join(report.command)))
    rows.append(tag("div", tag("dt", "command"), command, class_="wide"))
    box = tag("div", tag("h1", sentence), class_=f"verdict {report.verdict.value}")
    return f"{sentence} - {name}" if name else sentence, joined([box, tag("dl", *rows, class_="facts")])


def _moment(started: object) -> str:
    """Date and minute; seconds and microseconds are in report.json."""
    day, _, rest = str(started or "").partition("T")
    zone = rest[-6:] if rest[-6:-5] in ("+", "-") else ""
    return f"{day} {rest[:5]} {'UTC' if zone == '+00:00' else zone}".strip() if rest else day


def _seconds(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
