"""DDP604: environments differ across ranks."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Rule

RULE = Rule(
    code="DDP604",
    severity=Severity.WARNING,
    title="Environments differ across ranks",
    summary="ranks run different software or use different digest algorithms",
    needs=(),
)

_FIELDS = {"torch": "torch", "python": "Python", "backend": "backend", "algorithm": "hash"}
_CONSEQUENCES = {
    "torch": "Kernels and DDP itself may differ between versions, and so may their results.",
    "python": "",
    "backend": "Ranks with different backends cannot reduce together.",
    "algorithm": "Digests of different algorithms cannot be compared: these ranks were NOT checked.",
}
_FIXES = {
    "algorithm": "Install xxhash for every rank, or set DDPCHECK_HASH=multilinear for all.",
}


def find(context: RuleContext) -> list[Finding]:
    findings = []
    for field, label in _FIELDS.items():
        values = {rank: str(getattr(data.header, field)) for rank, data in context.attempt.ranks.items()}
        groups = groups_of(values)
        if len(groups) < 2:
            continue
        versions = "; ".join(f"{name_ranks(ranks)}: {value or 'unknown'}" for value, ranks in groups)
        findings.append(
            context.finding(
                RULE,
                f"Ranks use different versions of {label} ({versions}). {_CONSEQUENCES[field]}".rstrip(),
                ranks=outlier_ranks([ranks for _, ranks in groups]),
                evidence={label: {name_ranks(ranks): value for value, ranks in groups}},
                cause=f"{label} differs",
                fix=_FIXES.get(field, "Start all ranks from the same environment or container image."),
            )
        )
    return findings
