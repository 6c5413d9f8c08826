"""One finding as plain text, for reports without tables."""

from __future__ import annotations

import io
import linecache
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.safe_text import safe_line, shortened
from ddpcheck.reports.terminal.console import ReportConsole
from ddpcheck.reports.terminal.evidence import print_evidence
from ddpcheck.rules.rule import Location, rule_of

_WIDTH = 100
_MOST_SOURCE = 100


def evidence_text(evidence: Mapping[str, Any]) -> str:
    """Evidence as on a terminal, without colours and without blank lines at either end."""
    sink = io.StringIO()
    console = Console(
        file=sink, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False, _environ={}
    )
    print_evidence(ReportConsole(console), evidence, indent=0)
    return sink.getvalue().strip("\n")


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")
# `/home/me/train.py:41 in main`, or `RuntimeError: ... (/home/me/train.py:41)`.
_CALL = re.compile(r"(?P<file>[^\s()][^()]*?\.py):(?P<line>\d+)(?: in |\)|$)")


def script_line(report: Report, finding: Finding) -> tuple[str, int | None]:
    """File and line of what the ranks were doing, or where the module is wrapped or stepped, or the script."""
    for text in _calls(finding):
        call = _CALL.search(text)
        if call and not any(mark in call["file"] for mark in _LIBRARIES):
            return call["file"], int(call["line"])
    return _of_module(report, finding) or (_script(report), None)


def _calls(finding: Finding) -> Iterator[str]:
    """Stacks of the outliers first, the innermost call first."""
    standings = finding.evidence.get("standings")
    if isinstance(standings, (list, tuple)):
        groups = [group for group in standings if isinstance(group, Mapping)]
        for group in sorted(groups, key=lambda one: not set(one.get("ranks", ())) & set(finding.ranks)):
            yield from map(str, group.get("stack") or ())
    optimizers = finding.evidence.get("optimizers")
    if isinstance(optimizers, (list, tuple)):
        # Those with parameters that are not compared.
        rows = [row for row in optimizers if isinstance(row, Mapping) and row.get("not_compared")]
        yield from (str(row.get("where", "")) for row in rows)
    called = finding.evidence.get("called_at")
    if isinstance(called, str):
        yield called
    details = finding.evidence.get("details")
    if isinstance(details, Mapping):
        outliers = [str(rank) for rank in finding.ranks]
        yield from (str(details[rank]) for rank in sorted(details, key=lambda rank: rank not in outliers))


def _of_module(report: Report, finding: Finding) -> tuple[str, int | None] | None:
    """Where the module is wrapped for differences at wrapping, else where the optimizer steps."""
    history = next((one for one in report.agreement if one.module == finding.module), None)
    rule = rule_of(finding.code)
    if history is None or rule is None or rule.location is Location.SCRIPT:
        return None
    at_wrapping = rule.location is Location.WRAPPING and finding.step is None
    location = history.wrapped_at if at_wrapping else history.stepped_at or history.wrapped_at
    file, _, line = location.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else None


def _script(report: Report) -> str:
    return next((word for word in report.command if word.endswith(".py")), "")


def short_path(path: str) -> str:
    """Relative to the working directory if it is below it."""
    below = os.path.relpath(path) if os.path.isabs(path) else path
    return path if below.startswith("..") else below


def source_line(file: str, number: int) -> str:
    """The line of the program, shortened; empty if the file is not here, as on a machine that only has the records."""
    return shortened(linecache.getline(file, number).strip(), _MOST_SOURCE)


def finding_text(finding: Finding) -> str:
    """Title, location, message, evidence, cause and fix."""
    lines = [
        f"{finding.severity.value} {finding.code}: {finding.title}",
        finding_location(finding) or None,
        finding.message if finding.message != finding.title else None,
        *(["", *evidence_text(finding.evidence).split("\n"), ""] if finding.evidence else []),
        f"why: {finding.cause}" if finding.cause else None,
        f"fix: {finding.fix}" if finding.fix else None,
        f"more: ddpcheck explain {finding.code}",
    ]
    return "\n".join(safe_line(line) for line in lines if line is not None)


def finding_location(finding: Finding, with_attempt: bool = False) -> str:
    """`step 5, stage params, module 0, parameter body.weight, rank 2`."""
    parts = [
        f"attempt {finding.attempt}" if with_attempt else "",
        "" if finding.step is None else f"step {finding.step}",
        f"stage {finding.stage}" if finding.stage else "",
        f"module {finding.module}" if finding.module else "",
        f"parameter {finding.parameter}" if finding.parameter else "",
        name_ranks(finding.ranks) if finding.ranks else "",
    ]
    return ", ".join(part for part in parts if part)
