"""DDP206: optimizers differ across ranks."""

from __future__ import annotations

from ddpcheck.analysis.case import Case
from ddpcheck.analysis.divergence import Divergence, divergence, hyper_rows
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.findings import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.rank_ranges import name_ranks

FIX = (
    "Compute learning rates and scales from values that are equal on every rank (reduce the metric first, or "
    "broadcast rank 0's decision), and load optimizer state on every rank."
)


def find(case: Case) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: Case, module: ModuleKey) -> list[Finding]:
    parted = divergence(case.attempt, module)
    if parted is not None:
        return [_parted(case, parted)] if parted.code == "DDP206" else []
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
            ranks=tuple(sorted(root.sightings)),
            evidence={"hyperparameters": hyper_rows(case.attempt, root)},
            cause="hyperparameters differ",
            fix=FIX,
        )
    ]


def _parted(case: Case, parted: Divergence) -> Finding:
    found = parted.found
    evidence = {**parted.evidence, **of_disagreement(case.attempt, found, case.folder)}
    names = evidence["parameters"]["names"]
    return case.finding(
        "DDP206",
        f"{parted.cause[0].upper()}{parted.cause[1:]}; after step {found.moment.step} the parameters are no "
        f"longer the same on all ranks; odd: {name_ranks(found.odd_ranks())}.",
        found=found,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=parted.cause,
        fix=FIX,
    )
