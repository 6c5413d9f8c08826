"""DDP604: environments differ across ranks."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks

_LOOKED_AT = {"torch": "torch", "python": "Python", "backend": "backend", "algorithm": "hash"}
_CONSEQUENCES = {
    "torch": "Kernels and DDP itself may differ between versions, and so may the bits they give.",
    "python": "",
    "backend": "Ranks that talk through different backends cannot reduce together.",
    "algorithm": "Digests of different kinds cannot be compared: the ranks named here were NOT checked.",
}
_FIXES = {
    "algorithm": "Install xxhash where every rank can import it, or set DDPCHECK_HASH=multilinear for all.",
}


def find(case: RuleContext) -> list[Finding]:
    findings = []
    for field, spoken in _LOOKED_AT.items():
        said = {rank: str(getattr(data.header, field)) for rank, data in case.attempt.ranks.items()}
        groups = groups_of(said)
        if len(groups) < 2:
            continue
        told = "; ".join(f"{name_ranks(ranks)}: {value or 'unknown'}" for value, ranks in groups)
        findings.append(
            case.finding(
                "DDP604",
                f"Ranks run with different versions of {spoken} ({told}). {_CONSEQUENCES[field]}".rstrip(),
                severity=Severity.WARNING,
                ranks=outlier_ranks([ranks for _, ranks in groups]),
                evidence={spoken: {name_ranks(ranks): value for value, ranks in groups}},
                cause=f"{spoken} differs",
                fix=_FIXES.get(field, "Start all ranks from the same environment or container image."),
            )
        )
    return findings
