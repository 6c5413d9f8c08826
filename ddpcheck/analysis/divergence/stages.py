"""Which gradient stage explains the parting of a module, once more exact causes have had their say."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.gradients import GradientDivergence, gradient_divergence
from ddpcheck.analysis.divergence.parameters import divergence
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.digests import Stage, TensorKind


def explained_by_stage(case: RuleContext, module: ModuleKey) -> GradientDivergence | None:
    """The gradients' own parting, unless the parameters had parted before, for another reason."""
    parted = gradient_divergence(case.attempt, module)
    if parted is None:
        return None
    params = divergence(case.attempt, module)
    if (
        params is not None
        and params.code != parted.code
        and params.found.moment.step <= parted.found.moment.step
    ):
        return None
    return parted


def partings(case: RuleContext, code: str) -> list[GradientDivergence]:
    found = [explained_by_stage(case, module) for module in case.modules()]
    return [parted for parted in found if parted is not None and parted.code == code]


def evidence_of(case: RuleContext, parted: GradientDivergence) -> dict[str, Any]:
    """What shows the parting of gradients.

    Their digests one by one are written only by ranks that saw it themselves. Where one had run too far ahead,
    the parameters that differ after the very step have to tell.
    """
    moment = parted.found.moment
    evidence = {**parted.evidence, **of_disagreement(case.attempt, parted.found, case.folder)}
    after = case.attempt.agreement.stats_of(moment.module, Stage.PARAMS, TensorKind.PARAMETERS).first
    if not evidence["parameters"]["names"] and after is not None and after.moment.step == moment.step:
        evidence["parameters"] = of_disagreement(case.attempt, after, case.folder)["parameters"]
    return evidence
