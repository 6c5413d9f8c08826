"""DDP202: gradients were applied without being reduced."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import (
    SYNCED,
    Divergence,
    Explanation,
    Precedence,
    gradient_evidence,
    reason_text,
)
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP202",
    severity=Severity.ERROR,
    title="Gradients were applied without being reduced",
    summary="gradients were applied without being reduced, and why",
    needs=(Need.APPLIED_GRADIENTS,),
    live=True,
    replicas_diverge=True,
    location=Location.STEP,
)

# How a rank's last backward ended, as records state it: the reducer still waits for gradients.
_UNFINISHED = "unfinished"
_NO_BACKWARD = "gradients set without a backward"
_HOOKS_LOST = "DDP's hooks are lost"
_MOST_NAMES = 10
_MOST_NAMES_IN_CAUSE = 3

FIXES = {
    "wrapper bypassed": "Call the DDP wrapper itself, ddp(inputs), in the training loop, not ddp.module(inputs).",
    "no_sync open": "Leave no_sync() before the forward of the last micro-batch, so that its backward is reduced.",
    "forward inside no_sync, backward outside": "Run forward and backward of a micro-batch both inside or both "
    "outside no_sync(): DDP decides in the forward.",
    "two forwards before two backwards": "Add the losses and call backward once, or run each backward before the "
    "next forward.",
    "second backward on one forward": "Add the losses and call backward once: DDP reduces one backward per forward.",
    _NO_BACKWARD: "Let loss.backward() fill the gradients, or all-reduce those that you set before the step.",
    _HOOKS_LOST: "Move the model to its device and dtype before wrapping, and wrap again after replacing its "
    "memory.",
}
_FIX_UNFINISHED = (
    "Use every parameter in the forward, freeze unused parameters before wrapping, or pass "
    "find_unused_parameters=True."
)


@RULE.explains_gradients(Precedence.NOT_REDUCED)
def _not_reduced(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    applied = {rank: record for rank, record in first.digests.items() if isinstance(record, AppliedRecord)}
    not_reduced = {rank: record for rank, record in applied.items() if record.last != SYNCED}
    if not not_reduced:
        return _hooks_lost(attempt, module, first)
    example = not_reduced[min(not_reduced)]
    ranks = tuple(sorted(not_reduced))
    evidence: dict[str, Any] = {
        "last_backward": {str(rank): record.last for rank, record in applied.items()},
        "reduced_backwards": {str(rank): record.synced for rank, record in applied.items()},
        "other_backwards": {str(rank): record.unsynced for rank, record in applied.items()},
    }
    if example.last != _UNFINISHED:
        return Explanation(cause=reason_text(example.reason) or _NO_BACKWARD, evidence=evidence, ranks=ranks)
    names = _names(attempt, module, example.waiting)
    evidence["unused_parameters"] = names[:_MOST_NAMES]
    cause = "reduction unfinished: no gradient arrived for " + ", ".join(names[:_MOST_NAMES_IN_CAUSE])
    return Explanation(cause=cause, evidence=evidence, parameter=names[0] if names else None, ranks=ranks)


def _hooks_lost(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """Forwards and backwards are in the right order, but every rank still holds its local gradients."""
    checks = attempt.gradients.stats.get(module)
    if checks is None or not checks.unreduced or checks.reduced_until >= first.key.step:
        return None
    return Explanation(cause=_HOOKS_LOST, evidence={"untouched_backwards": checks.unreduced})


def _names(attempt: Attempt, module: ModuleKey, indices: list[int]) -> list[str]:
    rows = next(iter(attempt.of_module(module).values())).as_wrapped[module].parameters
    return [str(rows[index][0]) for index in indices if index < len(rows)]


def find(context: RuleContext) -> list[Finding]:
    return [_finding(context, divergence) for divergence in context.diverged_gradients(RULE)]


def _finding(context: RuleContext, divergence: Divergence) -> Finding:
    first = divergence.first
    evidence = gradient_evidence(context.attempt, divergence, context.folder)
    names = evidence["parameters"]["names"]
    ranks = name_ranks(divergence.ranks or tuple(first.digests))
    not_compared = (
        ""
        if first.digested
        else " The gradients of this step were not compared; the parameters differ after step "
        f"{evidence['parameters_differ_after_step']}."
    )
    return context.finding(
        RULE,
        f"At step {divergence.step} the optimizer applies gradients that DDP did not reduce on {ranks} "
        f"({divergence.cause}). Each rank applies a different update.{not_compared}",
        disagreement=first,
        ranks=divergence.ranks or first.outlier_ranks(),
        parameter=divergence.parameter or (names[0] if names else None),
        evidence=evidence,
        cause=divergence.cause,
        fix=FIXES.get(divergence.cause, _FIX_UNFINISHED),
    )
