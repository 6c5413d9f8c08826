"""TensorBoard's text: the verdict, the findings, and the overlap of the profiled steps."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.reports.ci.markdown import markdown_table, report_tables
from ddpcheck.reports.finding_text import evidence_text, finding_location
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.verdict import counted, in_order, verdict_sentence
from ddpcheck.reports.views.overlap import profiled_overlap

_MOST_FINDINGS = 20
_MOST_ROWS = 64
# TensorBoard's Markdown passes HTML and images through and has few escapes; character references are safe.
_ACTIVE = re.compile(r"[^\w\s.,;()/%=-]|(?<=:)//|^[-+=\d]|_")
WHY_IT_DIFFERS = """\
The tab *PYTORCH_PROFILER* shows overlap too, and its figures may differ. It counts a kernel as communication only \
if an identifier links it to an operator such as nccl:all_reduce. Current traces have no such link, so it counts \
NCCL kernels as compute and communication seems hidden behind itself. With gloo it counts every other CPU operator \
on any thread as compute, including those of ddpcheck. ddpcheck identifies NCCL kernels by name and gloo \
collectives by their spans, excludes its own work, and intersects exact unions of intervals. Where the two differ, \
use these figures."""


def plain_text(value: object) -> str:
    """Text in which nothing is markup, in a line or in a cell of a table."""
    return _ACTIVE.sub(lambda match: "".join(f"&#{ord(c)};" for c in match[0]), safe_line(value))


def verdict_text(report: Report) -> str:
    """A short version of the report."""
    ordered = in_order(report)
    blocks = [f"## {plain_text(verdict_sentence(report))}", _about(report)]
    blocks += [_finding(finding) for finding in ordered[:_MOST_FINDINGS]]
    more = len(ordered) - _MOST_FINDINGS
    blocks += [f"and {counted(more, 'more finding')}, in report.json"] if more > 0 else []
    blocks += report_tables(report, plain_text)
    return "\n\n".join(block for block in blocks if block)


def rank_text(report: Report, rank: int) -> str:
    """The findings about a rank; empty if there is none."""
    mine = [finding for finding in in_order(report) if rank in finding.ranks]
    return "\n\n".join(_finding(finding) for finding in mine[:_MOST_FINDINGS])


def overlap_text(report: Report) -> str:
    """Overlap by rank, and why the profiler's own tab shows other figures; empty if no step was profiled."""
    profiled = profiled_overlap(report)
    if profiled is None:
        return ""
    table = replace(profiled.ranks, rows=profiled.ranks.rows[:_MOST_ROWS])
    heading = f"## {plain_text(', '.join(filter(None, (table.title, table.subtitle))))}"
    missing = "\n".join(f"- {plain_text(note)}" for note in table.notes)
    content = markdown_table(table, plain_text) if table.rows else "There is no usable trace."
    return "\n\n".join(filter(None, (heading, content, missing, WHY_IT_DIFFERS)))


def _about(report: Report) -> str:
    size = f"{counted(report.world_size, 'rank')}, {counted(report.steps, 'step')}"
    return f"{_code(shlex.join(report.command))}\n\n{size}" if report.command else size


def _finding(finding: Finding) -> str:
    location = finding_location(finding)
    blocks = [
        f"### {finding.severity.value} {finding.code}: {plain_text(finding.title)}",
        f"*{plain_text(location)}*" if location else "",
        plain_text(finding.message) if finding.message != finding.title else "",
        _code(evidence_text(finding.evidence)) if finding.evidence else "",
        f"**why** {plain_text(finding.cause)}" if finding.cause else "",
        f"**fix** {plain_text(finding.fix)}" if finding.fix else "",
    ]
    return "\n\n".join(block for block in blocks if block)


def _code(text: str) -> str:
    """An indented code block: no text in it can end it."""
    return "\n".join(f"    {safe_line(line)}" for line in text.splitlines())
