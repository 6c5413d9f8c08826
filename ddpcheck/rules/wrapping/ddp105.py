"""DDP105: a module outside of DDP is used in training and differs across ranks."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.unwrapped.collector import UnwrappedCollector
from ddpcheck.analysis.unwrapped.judgement import (
    Basis,
    UnwrappedDifference,
    unwrapped_modules,
    used_difference,
)
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.modules import ModuleRole, UseEvidence
from ddpcheck.rules.rule import Rule, first_sentence

RULE = Rule(
    code="DDP105",
    severity=Severity.ERROR,
    title="A module outside DDP is used in training and differs across ranks",
    summary="a module outside DDP is used in training, differs across ranks and is never synchronised",
    headline=first_sentence,
)

_HOW = {
    UseEvidence.FEEDS_FORWARD.value: "its output is an input of the DDP module",
    UseEvidence.SHARES_INPUT.value: "it reads the input of the DDP module",
    UseEvidence.IN_LOSS.value: "it runs between the forward of the DDP module and the backward",
    UseEvidence.FOLLOWS.value: "it is a moving average of the DDP module, from other values on each rank",
    UseEvidence.COPIED.value: "it becomes a copy of the DDP module now and then, not at the same step on all ranks",
}


def find(context: RuleContext) -> list[Finding]:
    findings = [
        used_difference(context.attempt, module)
        for module in unwrapped_modules(context.attempt, ModuleRole.USED)
    ]
    return [_finding(context, difference) for difference in findings if difference is not None]


def _finding(context: RuleContext, difference: UnwrappedDifference) -> Finding:
    first, module = difference.first, difference.module
    evidence = of_disagreement(context.attempt, first, context.folder)
    record = next(iter(context.attempt.of_module(module).values())).latest[module]
    uses = sorted(context.attempt.collector(UnwrappedCollector).uses.get(module, ()))
    if record.where:
        evidence["called_at"] = record.where
    evidence["used"] = [_HOW.get(use, use) for use in uses]
    differing = evidence["parameters"]
    names = [f"{record.name}.{name}" for name in differing["names"]]
    severity = {Basis.NONE: Severity.NOTE, Basis.CONSTANT: Severity.WARNING}.get(difference.basis)
    judged = difference.basis is not Basis.NONE
    return context.finding(
        RULE,
        f"{record.name} is outside DDP, takes part in training steps and differs across ranks. "
        f"{differing['count']} of {differing['of']} parameters differ, also at the end of the job. "
        f"Outlier: {name_ranks(first.outlier_ranks())}."
        + ("" if judged else " Nothing shows that it has to be equal, so this is not judged."),
        severity=severity,
        step=first.key.step,
        stage=first.key.stage,
        parameter=names[0] if names else None,
        ranks=first.outlier_ranks(),
        evidence=evidence,
        cause=_cause(difference, evidence["used"]),
        fix="Load or initialise it from the same values on every rank, for example with a broadcast from rank 0 "
        "before the first step, or copy it from the DDP module."
        if judged
        else "Nothing, if each rank is meant to have its own. Otherwise broadcast it from rank 0.",
    )


def _cause(difference: UnwrappedDifference, uses: list[str]) -> str:
    if difference.basis is Basis.CONSTANT:
        return "never synchronised: each rank has its own values, and they stay the same in the whole job"
    how = f": {', and '.join(uses)}" if uses else ""
    return f"never synchronised: DDP broadcasts only what it wraps{how}"
