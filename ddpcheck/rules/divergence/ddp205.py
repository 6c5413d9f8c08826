"""DDP205: gradients were changed differently on some rank between backward and step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.gradients import GradientDivergence
from ddpcheck.analysis.divergence.stages import evidence_of, partings
from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks

# Values of one tensor that must tell the same; fewer may do so by chance.
LEAST = 3
# Scaling rounds each value once: far less than this, in every format but fp8.
SAME_FACTOR = 0.01


def how_changed(elements: Mapping[str, Any], odd: int, usual: int) -> str:
    """What was done on rank `odd` that was not done on rank `usual`, in words; empty where it does not show."""
    pairs = [
        (float(said[str(odd)]), float(said[str(usual)]))
        for said in (row["by_rank"] for row in elements.get("values", ()))
        if isinstance(said.get(str(odd)), float) and isinstance(said.get(str(usual)), float)
    ]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if len(pairs) < LEAST:
        return ""
    return _zeroed(pairs, odd) or _clamped(pairs, odd) or _scaled(pairs, odd, usual)


def _zeroed(pairs: Sequence[tuple[float, float]], odd: int) -> str:
    return f"set to zero on rank {odd}" if all(ours == 0 for ours, _ in pairs) else ""


def _clamped(pairs: Sequence[tuple[float, float]], odd: int) -> str:
    """All values that differ stand at one limit, on their own side of zero, and were beyond it."""
    limit = abs(pairs[0][0])
    at_limit = all(abs(ours) == limit and ours * theirs > 0 and abs(theirs) > limit for ours, theirs in pairs)
    return f"clamped at {limit:.3g} on rank {odd}" if at_limit else ""


def _scaled(pairs: Sequence[tuple[float, float]], odd: int, usual: int) -> str:
    factors = sorted(ours / theirs for ours, theirs in pairs if theirs)
    if len(factors) < LEAST or not factors[0] * factors[-1] > 0:
        return ""
    if abs(factors[-1] - factors[0]) > SAME_FACTOR * abs(factors[0]):
        return ""
    factor = factors[len(factors) // 2]
    return f"scaled by different factors: rank {odd}'s are {factor:.3g} times those of rank {usual}"


def find(case: RuleContext) -> list[Finding]:
    return [_finding(case, parted) for parted in partings(case, "DDP205")]


def _finding(case: RuleContext, parted: GradientDivergence) -> Finding:
    found = parted.found
    evidence = evidence_of(case, parted)
    names = evidence["parameters"]["names"]
    how = _how(found, evidence)
    return case.finding(
        "DDP205",
        f"At step {found.moment.step} the reduction had left the same gradients on all ranks, but what the optimizer "
        f"applies is not the same; odd: {name_ranks(found.outlier_ranks())}.",
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
