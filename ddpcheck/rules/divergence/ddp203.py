"""DDP203: reduced gradients differ across ranks."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.gradients import GradientDivergence
from ddpcheck.analysis.divergence.stages import evidence_of, partings
from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage


def find(case: RuleContext) -> list[Finding]:
    return [_finding(case, parted) for parted in partings(case, "DDP203")]


def _finding(case: RuleContext, parted: GradientDivergence) -> Finding:
    found = parted.found
    evidence = evidence_of(case, parted)
    names = evidence["parameters"]["names"]
    hooks = sorted({hook for rank in case.attempt.ranks.values() for hook in rank.hooks(found.moment.module)})
    if hooks:
        evidence["comm_hooks"] = hooks
    return case.finding(
        "DDP203",
        f"At step {found.moment.step} DDP had finished its reduction, and the gradients it left are not the same on "
        f"all ranks; odd: {name_ranks(found.outlier_ranks())}.",
        found=found,
        stage=Stage.REDUCED.value,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=parted.cause + (f"; a communication hook is at work: {', '.join(hooks)}" if hooks else ""),
        fix="A communication hook must return the same on every rank. Without one, suspect memory or the network of "
        "the odd rank: run it elsewhere, and check its hardware.",
    )
