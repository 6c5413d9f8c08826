"""Which gradient stage explains the parting of a module, once more exact causes have had their say."""

from __future__ import annotations

from ddpcheck.analysis.agreement import ModuleKey
from ddpcheck.analysis.case import Case
from ddpcheck.analysis.divergence import divergence
from ddpcheck.analysis.gradient_divergence import GradientDivergence, gradient_divergence


def explained_by_stage(case: Case, module: ModuleKey) -> GradientDivergence | None:
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


def partings(case: Case, code: str) -> list[GradientDivergence]:
    found = [explained_by_stage(case, module) for module in case.modules()]
    return [parted for parted in found if parted is not None and parted.code == code]
