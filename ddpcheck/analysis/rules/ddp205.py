"""DDP205: gradients were changed differently on some rank between backward and step."""

from __future__ import annotations

from ddpcheck.analysis.case import Case, name_ranks
from ddpcheck.analysis.findings import Finding
from ddpcheck.analysis.gradient_divergence import GradientDivergence
from ddpcheck.analysis.partings import evidence_of, partings


def find(case: Case) -> list[Finding]:
    return [_finding(case, parted) for parted in partings(case, "DDP205")]


def _finding(case: Case, parted: GradientDivergence) -> Finding:
    found = parted.found
    evidence = evidence_of(case, parted)
    names = evidence["parameters"]["names"]
    return case.finding(
        "DDP205",
        f"At step {found.moment.step} the reduction had left the same gradients on all ranks, but what the optimizer "
        f"applies is not the same; odd: {name_ranks(found.odd_ranks())}.",
        found=found,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=parted.cause,
        fix="Clip, scale and mask gradients on every rank alike, by numbers that are equal everywhere: the norm of "
        "the reduced gradient, not that of a rank's own loss or data.",
    )
