"""One finding as lines of plain text, for places that know no tables."""

from __future__ import annotations

from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.evidence_text import evidence_text
from ddpcheck.reports.safe_text import safe_line


def finding_text(finding: Finding) -> str:
    """What, where, the evidence, why, and what to do."""
    lines = [
        f"{finding.severity.value} {finding.code}: {finding.title}",
        finding_place(finding) or None,
        finding.message if finding.message != finding.title else None,
        *(["", *evidence_text(finding.evidence).split("\n"), ""] if finding.evidence else []),
        f"why: {finding.cause}" if finding.cause else None,
        f"fix: {finding.fix}" if finding.fix else None,
        f"more: ddpcheck explain {finding.code}",
    ]
    return "\n".join(safe_line(line) for line in lines if line is not None)


def finding_place(finding: Finding) -> str:
    """`step 5, stage params, parameter body.weight, rank 2`."""
    parts = [
        "" if finding.step is None else f"step {finding.step}",
        f"stage {finding.stage}" if finding.stage else "",
        f"parameter {finding.parameter}" if finding.parameter else "",
        name_ranks(finding.ranks) if finding.ranks else "",
    ]
    return ", ".join(part for part in parts if part)
