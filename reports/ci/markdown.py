"""The report in Markdown, for job summaries, merge requests and chats."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.reports.finding_text import evidence_text, finding_location
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.verdict import counted, in_order, verdict_sentence
from ddpcheck.reports.views.cost import cost_lines
from ddpcheck.reports.views.ranks import check_table, rank_tables
from ddpcheck.reports.views.table import Table

_MOST_FINDINGS = 20
_MARKS = {Verdict.OK: "✅", Verdict.FINDINGS: "❌", Verdict.FAILED: "❌", Verdict.INCOMPLETE: "⚠️"}
# Whatever could start markup, a link or a table's next cell; and at the beginning, a list or a heading.
_ACTIVE = re.compile(r"([\\`*_\[\]|~<>&]|(?<=:)//|^[-+#=]|(?<=^\d)[.)])")


def to_markdown(report: Report) -> str:
    """Verdict, findings, ranks and checks."""
    blocks = [f"## {_MARKS[report.verdict]} {plain_text(verdict_sentence(report))}", _about(report)]
    ordered = in_order(report)
    blocks += [_finding(finding) for finding in ordered[:_MOST_FINDINGS]]
    more = len(ordered) - _MOST_FINDINGS
    blocks += [f"and {counted(more, 'more finding')}, in report.json"] if more > 0 else []
    blocks += report_tables(report, plain_text)
    blocks += [". ".join(map(plain_text, cost_lines(report)))]
    return "\n\n".join(block for block in blocks if block) + "\n"


def plain_text(value: object) -> str:
    """Text in which nothing is markup."""
    return _ACTIVE.sub(r"\\\1", safe_line(value))


def code(value: object) -> str:
    """A code span; a longer fence keeps backticks inside it, and bars are escaped for tables."""
    text = safe_line(value).replace("|", "\\|")
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _about(report: Report) -> str:
    size = f"{counted(report.world_size, 'rank')}, {counted(report.steps, 'step')}"
    return f"{code(shlex.join(report.command))}, {size}" if report.command else size


def _finding(finding: Finding) -> str:
    lines = [f"### {finding.severity.value} {finding.code}: {plain_text(finding.title)}", ""]
    location = finding_location(finding)
    lines += [f"*{plain_text(location)}*", ""] if location else []
    lines += [plain_text(finding.message), ""] if finding.message != finding.title else []
    lines += [_fenced(evidence_text(finding.evidence)), ""] if finding.evidence else []
    lines += [f"- **why** {plain_text(finding.cause)}"] if finding.cause else []
    lines += [f"- **fix** {plain_text(finding.fix)}"] if finding.fix else []
    return "\n".join(lines)


def report_tables(report: Report, escaped: Callable[[object], str]) -> list[str]:
    """The ranks of the last attempt, and the checks."""
    tables = [*rank_tables(report)[-1:], check_table(report)]
    return [markdown_table(table, escaped) for table in tables if table is not None]


def markdown_table(table: Table, escaped: Callable[[object], str]) -> str:
    """A view without the columns that need more room."""
    kept = [index for index, column in enumerate(table.columns) if not column.detail]
    lines = [
        [table.columns[index].label for index in kept],
        ["--:" if table.columns[index].number else "---" for index in kept],
        *([escaped(row.cells[index].plain) for index in kept] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
