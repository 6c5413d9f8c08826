"""DDP208: parameters were written outside the optimizer step."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.parameters import Divergence, divergence, writers
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks


def find(case: RuleContext) -> list[Finding]:
    parted = [divergence(case.attempt, module) for module in case.modules()]
    return [_finding(case, one) for one in parted if one is not None and one.code == "DDP208"]


def _finding(case: RuleContext, parted: Divergence) -> Finding:
    found, root = parted.found, parted.root or parted.found
    evidence = {**parted.evidence, **of_disagreement(case.attempt, found, case.folder)}
    names = evidence["parameters"]["names"]
    if parted.root is not None:
        wrote = writers(root)
        evidence["rewritten_on_ranks"] = list(wrote)
        told = (
            f"Before step {root.moment.step} and outside any optimizer, {name_ranks(wrote)} wrote to the "
            "parameters, and not all ranks hold the same since."
        )
    else:
        told = (
            f"At step {found.moment.step} {evidence['parameters']['count']} parameters differ that no "
            f"optimizer steps: something else wrote to them; odd: {name_ranks(found.outlier_ranks())}."
        )
    return case.finding(
        "DDP208",
        told,
        found=root,
        step=root.moment.step,
        parameter=names[0] if names else None,
        ranks=root.outlier_ranks() if len(root.groups()) > 1 else found.outlier_ranks(),
        evidence=evidence,
        cause=parted.cause,
        fix="Load checkpoints on every rank (or before wrapping), and compute moving averages and hand-made "
        "updates from values that were reduced or broadcast first: the gradients that loss.backward() leaves after "
        "a forward through the wrapper are, those of autograd.grad are not.",
    )
