"""DDP202: gradients were applied without being reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_unwrapped
from ddpcheck.analysis.collectors.manual_reduction import (
    ManualReductionCollector,
    PartlyReduced,
    partly_reduced_text,
)
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import (
    SYNCED,
    Divergence,
    Explanation,
    Precedence,
    gradient_evidence,
    reason_text,
)
from ddpcheck.analysis.evidence import differing_tensors, tensor_rows
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
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
_NOT_BY_HAND = "not all gradients reduced by hand"
_MOST_NAMES = 10
_MOST_NAMES_IN_CAUSE = 3

FIXES = {
    "wrapper bypassed": "Call the DDP wrapper itself, ddp(inputs), in the training loop, not ddp.module(inputs).",
    "no_sync open": "Leave no_sync() before the forward of the last micro-batch, so that its backward is reduced.",
    "forward inside no_sync, backward outside": "Run forward and backward of a micro-batch both inside or both "
    "outside no_sync(): DDP decides in the forward.",
    "two forwards before two backwards": "Add the losses and call backward once, or run each backward before the "
    "next forward.",
    "second backward on one forward, or on a forward around the wrapper": "Add the losses and call backward once: DDP "
    "reduces one backward per forward. Call ddp(inputs), not ddp.module(inputs), in every forward that is trained.",
    "step inside the backward, before DDP reduced the gradients": "Step after backward() has returned. To step while "
    "the backward runs, let DDP do it: torch.distributed.optim._apply_optimizer_in_backward before wrapping.",
    "require_backward_grad_sync off": "Set require_backward_grad_sync to True before the forward of the last "
    "micro-batch, or use no_sync() for the others, so that this backward is reduced.",
    "require_backward_grad_sync off in the forward, on in the backward": "Set require_backward_grad_sync before the "
    "forward, not between forward and backward: DDP decides in the forward.",
    _NO_BACKWARD: "Let loss.backward() fill the gradients, or all-reduce those that you set before the step.",
    _HOOKS_LOST: "Move the model to its device and dtype before wrapping, and wrap again after replacing its "
    "memory.",
}
_FIX_BY_HAND = (
    "Before each step, all-reduce the gradients of all parameters over the default process group on every rank, and "
    "divide by the number of ranks; or wrap the model in DDP."
)
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
    if is_unwrapped(module):
        return _by_hand(attempt, module, first)
    if _is_reduced_by_hand(attempt, module, not_reduced):
        return replace(_by_hand(attempt, module, first), fix=_FIX_BY_HAND)
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


def _is_reduced_by_hand(
    attempt: Attempt, module: ModuleKey, not_reduced: Mapping[int, AppliedRecord]
) -> bool:
    """Whether the job reduces the gradients of a DDP module itself, as after no_sync, where DDP does not."""
    stats = attempt.collector(ManualReductionCollector).stats.get(module)
    return stats is not None and stats.reduced and all(record.unsynced for record in not_reduced.values())


def _by_hand(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation:
    """The job reduces gradients itself: those of this step not all, or not over all ranks."""
    stats = attempt.collector(ManualReductionCollector).stats.get(module)
    partly = None if stats is None else stats.partly.get(first.key.step)
    rows = tensor_rows(attempt, first)
    if partly is None:
        # The step was not sketched, or something changed the gradients after the reduction.
        groups = tuple(ranks for _, ranks in first.groups())
        differing = differing_tensors(attempt, first)
        in_groups = any(len(ranks) > 1 for ranks in groups)
        partly = PartlyReduced(
            first.key.step, () if in_groups else tuple(differing), groups if in_groups else ()
        )
    cause = partly_reduced_text(partly, tuple(sorted(first.digests)))
    names = [str(rows[index][0]) for index in partly.left_out if index < len(rows)]
    if names and (cause or len(names) < len(rows)):
        shown = ", ".join(names[:_MOST_NAMES_IN_CAUSE])
        more = f" and {len(names) - _MOST_NAMES_IN_CAUSE} more" if len(names) > _MOST_NAMES_IN_CAUSE else ""
        left_out = f"{shown}{more} left out of a reduction by hand"
        cause = f"{cause}; {left_out}" if cause else left_out
        return Explanation(cause=cause, parameter=names[0], ranks=tuple(sorted(first.digests)))
    return Explanation(cause=cause or _NOT_BY_HAND, ranks=first.outlier_ranks())


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
    averaged = [module for module in context.modules() if context.attempt.agreement.averaged(module)]
    findings = [_finding(context, divergence) for divergence in context.diverged_gradients(RULE)]
    return findings + [_averaged(context, module) for module in averaged]


def _averaged(context: RuleContext, module: ModuleKey) -> Finding:
    """Replicas that differ for some steps and then take over common values, again and again: local SGD."""
    agreement = context.attempt.agreement
    steps = agreement.reunions[module].averaged
    first = agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS).first
    assert first is not None
    periods = {later - earlier for earlier, later in pairwise(steps)}
    how_often = f"every {periods.pop()} steps" if len(periods) == 1 else "from time to time"
    final = {rank.final.get(module) for rank in context.attempt.of_module(module).values()}
    at_end = "equal" if len(final) == 1 else "not equal: the last steps were not averaged"
    return context.finding(
        RULE,
        f"Replicas differ from step {first.key.step} on, and all ranks take over common values {how_often}, first "
        f"after step {steps[0]}: local SGD. At the end they are {at_end}. Steps in between are not compared.",
        severity=Severity.NOTE,
        disagreement=first,
        ranks=tuple(module[0]),
        evidence={"averaged_after_steps": steps, "equal_at_the_end": len(final) == 1},
        cause="parameters are averaged from time to time instead of gradients at every step",
        fix="Nothing, if this is how the job is meant to train. Average after the last step as well.",
    )


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
    by_hand = is_unwrapped(first.key.module) or divergence.fix == _FIX_BY_HAND
    what = "gradients that differ on" if by_hand else "gradients that DDP did not reduce on"
    return context.finding(
        RULE,
        f"At step {divergence.step} the optimizer applies {what} {ranks} "
        f"({divergence.cause}). Each rank applies a different update.{not_compared}",
        disagreement=first,
        ranks=divergence.ranks or first.outlier_ranks(),
        parameter=divergence.parameter or (names[0] if names else None),
        evidence=evidence,
        cause=divergence.cause,
        fix=divergence.fix or (_FIX_BY_HAND if by_hand else FIXES.get(divergence.cause, _FIX_UNFINISHED)),
    )
