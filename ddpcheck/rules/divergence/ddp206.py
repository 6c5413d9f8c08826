"""DDP206: optimizers differ across ranks."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.optimizers import RecreatedOptimizer, made_anew
from ddpcheck.analysis.divergence.parameters import Divergence, divergence, hyper_rows
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage

FIX = (
    "Compute learning rates and scales from values that are equal on every rank (reduce the metric first, or "
    "broadcast rank 0's decision), and load optimizer state on every rank."
)


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    parted = divergence(case.attempt, module)
    if parted is not None:
        return [_parted(case, parted)] if parted.code == "DDP206" else []
    anew = made_anew(case.attempt, module)
    if anew is not None:
        return [_made_anew(case, module, anew)]
    root = case.attempt.agreement.hyper.get(module)
    if root is None:
        return []
    return [
        case.finding(
            "DDP206",
            f"From step {root.moment.step} on hyperparameters are not the same on all ranks, though the "
            "parameters still were.",
            severity=Severity.NOTE,
            found=root,
            ranks=tuple(sorted(root.digests)),
            evidence={"hyperparameters": hyper_rows(case.attempt, root)},
            cause="hyperparameters differ",
            fix=FIX,
        )
    ]


def _made_anew(case: RuleContext, module: ModuleKey, anew: RecreatedOptimizer) -> Finding:
    who = name_ranks(anew.ranks)
    came = (
        "the parameters are not the same on all ranks at the end"
        if anew.parted
        else "the rest could not be compared"
    )
    return case.finding(
        "DDP206",
        f"From step {anew.step} on ranks do not step with the same optimizers; odd: {who}. One was made anew on some "
        f"rank alone, and {came}.",
        severity=Severity.ERROR if anew.parted else Severity.NOTE,
        module=module,
        step=anew.step,
        stage=Stage.PARAMS.value,
        ranks=anew.ranks,
        evidence={"optimizers_differ_from_step": anew.step},
        cause="an optimizer made anew on some rank: its state, momenta and step counts, begins from nothing there",
        fix="Make a new optimizer on every rank or on none; to start over, decide on one rank and broadcast that.",
    )


def _parted(case: RuleContext, parted: Divergence) -> Finding:
    found = parted.found
    evidence = {**parted.evidence, **of_disagreement(case.attempt, found, case.folder)}
    names = evidence["parameters"]["names"]
    return case.finding(
        "DDP206",
        f"{parted.cause[0].upper()}{parted.cause[1:]}; after step {found.moment.step} the parameters are no "
        f"longer the same on all ranks; odd: {name_ranks(found.outlier_ranks())}.",
        found=found,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=parted.cause,
        fix=FIX,
    )
