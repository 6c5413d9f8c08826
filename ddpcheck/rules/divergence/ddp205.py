"""DDP205: gradients were changed differently on some rank between backward and step."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.context import Case
from ddpcheck.analysis.divergence.gradients import GradientDivergence
from ddpcheck.analysis.divergence.stages import evidence_of, partings
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.gradient_change import how_changed
from ddpcheck.formatting import name_ranks


def find(case: Case) -> list[Finding]:
    return [_finding(case, parted) for parted in partings(case, "DDP205")]


def _finding(case: Case, parted: GradientDivergence) -> Finding:
    found = parted.found
    evidence = evidence_of(case, parted)
    names = evidence["parameters"]["names"]
    how = _how(found, evidence)
    return case.finding(
        "DDP205",
        f"At step {found.moment.step} the reduction had left the same gradients on all ranks, but what the optimizer "
        f"applies is not the same; odd: {name_ranks(found.odd_ranks())}.",
        found=found,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=f"{parted.cause}; {how}" if how else parted.cause,
        fix="Clip, scale and mask gradients on every rank alike, by numbers that are equal everywhere: the norm of "
        "the reduced gradient, not that of a rank's own loss or data.",
    )


def _how(found: Disagreement, evidence: dict[str, Any]) -> str:
    """Seen from the largest group, or from a rank that changed nothing: what does another one hold?"""
    elements = evidence.get("elements", {})
    # Values of a later step show what came of it, not what was done.
    if elements.get("step") != found.moment.step:
        return ""
    wrote = evidence["written_after_backward_on_ranks"]
    # Values are kept by those that were in time.
    kept = {rank for row in elements["values"] for rank in row["by_rank"]}
    sides = [[rank for rank in ranks if str(rank) in kept] for _, ranks in found.groups()]
    shown = [ranks for ranks in sides if ranks]
    if len(shown) < 2:
        return ""
    usual = next((rank for ranks in shown for rank in ranks if rank not in wrote), shown[0][0])
    odd = next(ranks[0] for ranks in shown if usual not in ranks)
    return how_changed(elements, odd, usual)
