"""What TensorBoard shows as text: the verdict, the findings, and overlap as ddpcheck reads it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.overlap.model import Overlap, RankOverlap
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import percent_text, rank_ranges, time_text
from ddpcheck.reports.finding_text import evidence_text, finding_place
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.terminal.ranks import rank_groups, standing
from ddpcheck.reports.verdict import counted, in_order, verdict_sentence

_MOST_FINDINGS = 20
_MOST_ROWS = 64
# TensorBoard's Markdown lets HTML and images through, and knows few escapes: numbers of characters it leaves alone.
_ACTIVE = re.compile(r"[^\w\s.,;()/%=-]|(?<=:)//|^[-+=\d]|_")
WHY_IT_DIFFERS = """\
The tab *PYTORCH_PROFILER* has figures for overlap too, which may be far from these. It takes a kernel for \
communication only where an identifier ties it to an operator such as nccl:all_reduce, and today's traces do not \
tie them so: there NCCL's kernels count as computation, and communication seems to be hidden behind itself. With \
gloo it takes every other operator on the processor for computation, on whatever thread, and those of ddpcheck \
too. ddpcheck tells NCCL's kernels by their names and gloo's by their spans, leaves its own work out, and \
compares exact unions of intervals. Where the two disagree, go by these."""


def plain_text(value: object) -> str:
    """Text that shows as it reads, in a line or in a cell of a table."""
    return _ACTIVE.sub(lambda match: "".join(f"&#{ord(c)};" for c in match[0]), safe_line(value))


def verdict_text(report: Report) -> str:
    """The whole report in short."""
    ordered = in_order(report)
    blocks = [f"## {plain_text(verdict_sentence(report))}", _about(report)]
    blocks += [_finding(finding) for finding in ordered[:_MOST_FINDINGS]]
    left_out = len(ordered) - _MOST_FINDINGS
    blocks += [f"and {counted(left_out, 'more finding')}, in report.json"] if left_out > 0 else []
    blocks += [_ranks(report), _checks(report)]
    return "\n\n".join(block for block in blocks if block)


def rank_text(report: Report, rank: int) -> str:
    """The findings that name a rank; nothing where none does."""
    mine = [finding for finding in in_order(report) if rank in finding.ranks]
    return "\n\n".join(_finding(finding) for finding in mine[:_MOST_FINDINGS])


def overlap_text(overlap: Overlap) -> str:
    """Figures by rank, and why the profiler's own tab shows others."""
    rows = [_overlap_row(rank) for rank in overlap.ranks[:_MOST_ROWS]]
    headers = ("rank", "communication", "hidden", "overlap", "exposed", "of it transfer", "of it waiting")
    said = f"## Overlap in steps {overlap.first_step}-{overlap.end_step - 1}, by ddpcheck"
    missing = [f"- {plain_text(sentence)}" for sentence in overlap.left_out]
    table = _table(headers, rows) if rows else "There is no trace that could be used."
    return "\n\n".join([said, table, *(["\n".join(missing)] if missing else []), WHY_IT_DIFFERS])


def _overlap_row(rank: RankOverlap) -> list[str]:
    return [
        str(rank.rank),
        time_text(rank.comm_ns),
        time_text(rank.overlap_ns),
        percent_text(rank.overlap_pct),
        time_text(rank.exposed_ns),
        time_text(rank.exposed_transfer_ns),
        time_text(rank.exposed_wait_ns),
    ]


def _about(report: Report) -> str:
    size = f"{counted(report.world_size, 'rank')}, {counted(report.steps, 'step')}"
    return f"{_code(shlex.join(report.command))}\n\n{size}" if report.command else size


def _finding(finding: Finding) -> str:
    place = finding_place(finding)
    blocks = [
        f"### {finding.severity.value} {finding.code}: {plain_text(finding.title)}",
        f"*{plain_text(place)}*" if place else "",
        plain_text(finding.message) if finding.message != finding.title else "",
        _code(evidence_text(finding.evidence)) if finding.evidence else "",
        f"**why** {plain_text(finding.cause)}" if finding.cause else "",
        f"**fix** {plain_text(finding.fix)}" if finding.fix else "",
    ]
    return "\n\n".join(block for block in blocks if block)


def _code(text: str) -> str:
    """Indented, so that nothing in it can end it."""
    return "\n".join(f"    {safe_line(line)}" for line in text.splitlines())


def _ranks(report: Report) -> str:
    groups = rank_groups(report.attempts[-1].ranks) if report.attempts else []
    rows = [
        [
            rank_ranges(rank.rank for rank in group),
            str(group[0].steps),
            " ".join(filter(None, [group[0].status.value, standing(group[0])])),
        ]
        for group in groups
    ]
    return _table(("ranks", "steps", "status"), rows) if rows else ""


def _checks(report: Report) -> str:
    rows = [[check.name, check.outcome, check.detail] for check in report.checks]
    return _table(("checked", "outcome", "how often"), rows) if rows else ""


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([plain_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
