"""The report in Markdown, for job summaries, merge requests and chats."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.formatting import rank_ranges
from ddpcheck.reports.finding_text import evidence_text, finding_place
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.terminal.ranks import rank_groups, standing
from ddpcheck.reports.verdict import counted, in_order, verdict_sentence

_MOST_FINDINGS = 20
_MARKS = {Verdict.OK: "✅", Verdict.FINDINGS: "❌", Verdict.FAILED: "❌", Verdict.INCOMPLETE: "⚠️"}
# Whatever could start markup, a link or a table's next cell; and at the beginning, a list or a heading.
_ACTIVE = re.compile(r"([\\`*_\[\]|~<>&]|(?<=:)//|^[-+#=]|(?<=^\d)[.)])")


def to_markdown(report: Report) -> str:
    """Verdict, findings, ranks and what was checked."""
    blocks = [f"## {_MARKS[report.verdict]} {plain_text(verdict_sentence(report))}", _about(report)]
    ordered = in_order(report)
    blocks += [_finding(finding) for finding in ordered[:_MOST_FINDINGS]]
    left_out = len(ordered) - _MOST_FINDINGS
    blocks += [f"and {counted(left_out, 'more finding')}, in report.json"] if left_out > 0 else []
    blocks += [_ranks(report), _checks(report)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def plain_text(value: object) -> str:
    """Text that shows as it reads, whatever Markdown would make of it."""
    return _ACTIVE.sub(r"\\\1", safe_line(value))


def code(value: object) -> str:
    """In a code span; backticks inside it are kept by a longer fence. Tables need their bars escaped."""
    said = safe_line(value).replace("|", "\\|")
    fence = "`" * (_longest_run(said) + 1)
    pad = " " if said.startswith("`") or said.endswith("`") else ""
    return f"{fence}{pad}{said}{pad}{fence}" if said else ""


def _fenced(text: str) -> str:
    """As it stands, whatever is in it: the fence is longer than any run of backticks inside."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _about(report: Report) -> str:
    size = f"{counted(report.world_size, 'rank')}, {counted(report.steps, 'step')}"
    return f"{code(shlex.join(report.command))}, {size}" if report.command else size


def _finding(finding: Finding) -> str:
    lines = [f"### {finding.severity.value} {finding.code}: {plain_text(finding.title)}", ""]
    place = finding_place(finding)
    lines += [f"*{plain_text(place)}*", ""] if place else []
    lines += [plain_text(finding.message), ""] if finding.message != finding.title else []
    lines += [_fenced(evidence_text(finding.evidence)), ""] if finding.evidence else []
    lines += [f"- **why** {plain_text(finding.cause)}"] if finding.cause else []
    lines += [f"- **fix** {plain_text(finding.fix)}"] if finding.fix else []
    return "\n".join(lines)


def _ranks(report: Report) -> str:
    if not report.attempts:
        return ""
    rows = [
        [
            rank_ranges(rank.rank for rank in group),
            str(group[0].steps),
            " ".join(filter(None, [group[0].status.value, standing(group[0])])),
        ]
        for group in rank_groups(report.attempts[-1].ranks)
    ]
    return _table(("ranks", "steps", "status"), rows)


def _checks(report: Report) -> str:
    rows = [[check.name, check.outcome, check.detail] for check in report.checks]
    return _table(("checked", "outcome", ""), rows) if rows else ""


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([plain_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
