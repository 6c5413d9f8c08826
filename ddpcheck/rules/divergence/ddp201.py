"""DDP201: parameters diverged, the general case."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.nodes import apart_findings
from ddpcheck.analysis.divergence.parameters import Divergence, divergence
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind

_ANY = (
    "the update itself was not the same on every rank; most often gradients that were applied without being reduced (a "
    "forward through model.module, a backward under no_sync, an unused parameter)"
)
_FIX_ANY = (
    "Call the DDP wrapper itself in the training loop, and let every backward that is followed by a step run outside "
    "no_sync()."
)
_SAME_GRADIENTS = (
    "the update itself was not the same on every rank: all applied the same gradients with the same hyperparameters, "
    "so what the optimizer keeps (momenta cleared or loaded on some rank), draws or computes with differs"
)
_FIX_SAME_GRADIENTS = (
    "Run again with --optimizer-state, which shows whether the optimizer's state differs before the step; clear or "
    "load it on every rank alike, and let a step draw random numbers from a generator that is seeded alike."
)


def find(case: RuleContext) -> list[Finding]:
    parted = [divergence(case.attempt, module) for module in case.modules()]
    found = [_finding(case, one) for one in parted if one is not None and one.code == "DDP201"]
    return found + apart_findings(case, "DDP201")


def _finding(case: RuleContext, parted: Divergence) -> Finding:
    found = parted.found
    evidence = of_disagreement(case.attempt, found, case.folder)
    differing = evidence["parameters"]
    same = _same_gradients(case, parted)
    return case.finding(
        "DDP201",
        f"After step {found.moment.step}, {differing['count']} of {differing['of']} parameters are no longer "
        f"the same on all ranks; odd: {name_ranks(found.outlier_ranks())}. Before it they were equal to the bit.",
        found=found,
        parameter=differing["names"][0] if differing["names"] else None,
        evidence=evidence,
        cause=_SAME_GRADIENTS if same else _ANY,
        fix=_FIX_SAME_GRADIENTS if same else _FIX_ANY,
    )


def _same_gradients(case: RuleContext, parted: Divergence) -> bool:
    """Whether all ranks are known to have applied the same gradients until the parting."""
    moment = parted.found.moment
    applied = case.attempt.agreement.stats_of(moment.module, Stage.APPLIED, TensorKind.GRADIENTS)
    return bool(applied.compared) and (applied.first is None or applied.first.moment.step > moment.step)
