"""GitHub Actions: annotations on source lines, and the job summary."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report
from ddpcheck.reports.ci.markdown import to_markdown
from ddpcheck.reports.finding_text import finding_location, script_line
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.verdict import in_order

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
# GitHub shows at most this many of each kind for one step.
_MOST_OF_A_KIND = 10
SUMMARY = "GITHUB_STEP_SUMMARY"


def workflow_commands(report: Report) -> str:
    """Workflow commands, one per line; text from the job cannot start another command."""
    lines: list[str] = []
    kinds: Counter[Severity] = Counter()
    for finding in in_order(report):
        kinds[finding.severity] += 1
        if kinds[finding.severity] <= _MOST_OF_A_KIND:
            lines.append(_annotation(report, finding))
    return "".join(f"{line}\n" for line in lines)


def add_summary(report: Report, environ: Mapping[str, str]) -> bool:
    """Append to the job summary; False if that failed. Outside of GitHub there is none."""
    path = environ.get(SUMMARY)
    if not path:
        return True
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(to_markdown(report))
    except OSError as error:
        sys.stderr.write(f"ddpcheck: the job summary could not be written: {error.strerror} ({path})\n")
        return False
    return True


def _annotation(report: Report, finding: Finding) -> str:
    file, line = script_line(report, finding)
    properties = {
        "file": _in_repository(file),
        "line": str(line) if line else "",
        "title": f"{finding.code} {finding.title}",
    }
    written = ",".join(f"{key}={_property(value)}" for key, value in properties.items() if value)
    parts = [finding.message or finding.title, finding_location(finding)]
    parts += [f"why: {finding.cause}"] if finding.cause else []
    parts += [f"fix: {finding.fix}"] if finding.fix else []
    message = "\n".join(safe_line(part) for part in parts if part)
    return f"::{_COMMANDS[finding.severity]} {written}::{_data(message)}"


def _in_repository(file: str) -> str:
    """Annotations need paths relative to the root of the repository, where jobs start."""
    if not os.path.isabs(file):
        return file
    root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    inside = os.path.relpath(file, root)
    return file if inside.startswith("..") else inside


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(safe_line(text)).replace(":", "%3A").replace(",", "%2C")
