"""DDP205: gradients were changed differently across ranks between backward and step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import Divergence, Explanation, Precedence, gradient_evidence
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP205",
    severity=Severity.ERROR,
    title="Gradients were changed differently between backward and step",
    summary="gradients were changed differently between backward and step",
    needs=(Need.APPLIED_GRADIENTS,),
    live=True,
    replicas_diverge=True,
    location=Location.STEP,
)

# Values of one tensor that must show the same change; fewer may do so by chance.
_FEWEST_VALUES = 3
# Scaling rounds each value once, which changes the factor by far less than this in every format but fp8.
_FACTOR_TOLERANCE = 0.01


@RULE.explains_gradients(Precedence.CHANGED_AFTER_REDUCTION)
def _changed_after_reduction(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """The reduction produced the same gradients on all ranks, as far as sketches show it."""
    applied = {rank: record for rank, record in first.digests.items() if isinstance(record, AppliedRecord)}
    written = [rank for rank, record in applied.items() if record.moved]
    step = first.key.step
    checks = attempt.gradients.stats.get(module)
    differed = checks is not None and checks.diverged is not None and checks.agreed_until < step
    # Writes through .data leave no trace in version counters, but the result of the reduction was sketched.
    agreed = checks is not None and step in checks.agreed
    if differed or not (written or agreed):
        return None
    cause = "gradients were written to between backward and step"
    if 0 < len(written) < len(applied):
        cause += f" on {name_ranks(written)} only"
    elif not agreed:
        cause += ", or the reduction did not give all ranks the same result: it was not verified at this step"
    evidence: dict[str, Any] = {"written_after_backward_on_ranks": written}
    return Explanation(
        cause=cause, evidence=evidence if agreed else {**evidence, "allreduce_verified": False}
    )


def find(context: RuleContext) -> list[Finding]:
    return [_finding(context, divergence) for divergence in context.diverged_gradients(RULE)]


def _finding(context: RuleContext, divergence: Divergence) -> Finding:
    first = divergence.first
    evidence = gradient_evidence(context.attempt, divergence, context.folder)
    names = evidence["parameters"]["names"]
    change = _change_between_ranks(first, evidence)
    verified = evidence.get("allreduce_verified", True)
    reduced = ", although the reduction produced the same on all ranks" if verified else ""
    return context.finding(
        RULE,
        f"At step {divergence.step} the optimizer applies gradients that differ across ranks{reduced}. "
        f"Outlier: {name_ranks(first.outlier_ranks())}.",
        disagreement=first,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=f"{divergence.cause}; {change}" if change else divergence.cause,
        fix="Clip, scale and mask gradients in the same way on every rank, by values that are equal on all ranks: "
        "the norm of the reduced gradient, not that of a rank's own loss or data.",
    )


def _change_between_ranks(first: Disagreement, evidence: dict[str, Any]) -> str:
    """Compares an outlier with the largest group, or with a rank that did not write to its gradients."""
    elements = evidence.get("elements", {})
    step = elements.get("step")
    # Parameters of a later step show the consequences. Its gradients were reduced anew and show a change of that step:
    # on a device, digests arrive when the values of the first step are gone.
    if step is None or (step != first.key.step and not evidence.get("gradients_compared", True)):
        return ""
    written = evidence["written_after_backward_on_ranks"]
    # Only ranks that noticed the disagreement in time kept values.
    kept = {rank for row in elements["values"] for rank in row["by_rank"]}
    groups = [[rank for rank in ranks if str(rank) in kept] for _, ranks in first.groups()]
    groups = [ranks for ranks in groups if ranks]
    if len(groups) < 2:
        return ""
    reference = next((rank for ranks in groups for rank in ranks if rank not in written), groups[0][0])
    outlier = next(ranks[0] for ranks in groups if reference not in ranks)
    change = describe_change(elements, outlier, reference)
    return f"{change} (at step {step})" if change and step != first.key.step else change


def describe_change(elements: Mapping[str, Any], outlier: int, reference: int) -> str:
    """What changed the values of rank `outlier` relative to rank `reference`; empty if no simple change explains it."""
    pairs = [
        (float(values[str(outlier)]), float(values[str(reference)]))
        for values in (row["by_rank"] for row in elements.get("values", ()))
        if isinstance(values.get(str(outlier)), float) and isinstance(values.get(str(reference)), float)
    ]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if len(pairs) < _FEWEST_VALUES:
        return ""
    return _zeroed(pairs, outlier) or _clamped(pairs, outlier) or _scaled(pairs, outlier, reference)


def _zeroed(pairs: Sequence[tuple[float, float]], outlier: int) -> str:
    return f"set to zero on rank {outlier}" if all(own == 0 for own, _ in pairs) else ""


def _clamped(pairs: Sequence[tuple[float, float]], outlier: int) -> str:
    """All values that differ have the same magnitude, keep their sign, and were larger before."""
    limit = abs(pairs[0][0])
    clamped = all(abs(own) == limit and own * other > 0 and abs(other) > limit for own, other in pairs)
    return f"clamped at {limit:.3g} on rank {outlier}" if clamped else ""


def _scaled(pairs: Sequence[tuple[float, float]], outlier: int, reference: int) -> str:
    factors = sorted(own / other for own, other in pairs if other)
    if len(factors) < _FEWEST_VALUES or not factors[0] * factors[-1] > 0:
        return ""
    if abs(factors[-1] - factors[0]) > _FACTOR_TOLERANCE * abs(factors[0]):
        return ""
    factor = factors[len(factors) // 2]
    return f"scaled by different factors: rank {outlier}'s values are {factor:.3g} times those of rank {reference}"
