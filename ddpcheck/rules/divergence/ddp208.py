"""DDP208: parameters were written outside the optimizer step."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import SYNCED, Divergence, Explanation, Precedence, reason_text
from ddpcheck.analysis.evidence import differing_tensors, of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.reasons import WriteWindow, is_stored_as
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP208",
    severity=Severity.ERROR,
    title="Parameters were written outside the optimizer step",
    summary="parameters were written outside the optimizer step, differently across ranks",
    needs=(Need.PARAMETERS,),
    live=True,
    replicas_diverge=True,
    location=Location.STEP,
)

_FIX = (
    "Load checkpoints on every rank (or before wrapping), and compute moving averages and manual updates from values "
    "that were reduced or broadcast first. Gradients of loss.backward() after a forward through the wrapper are "
    "reduced; those of autograd.grad are not."
)

_FIX_IN_FORWARD = (
    "Do not write to parameters in the forward: each rank has another batch there. Keep running values as buffers, "
    "which DDP broadcasts from rank 0, or compute the written values from activations that were all-reduced first."
)
_FIX_BEFORE_STEP = (
    "Write to parameters between backward and step only by values that are equal on every rank: reduce or broadcast "
    "them first."
)
_FIX_BY_HAND = (
    "Update parameters from gradients that DDP has reduced: forward through the wrapper outside no_sync(), then "
    "loss.backward(), then the update. Gradients of autograd.grad are not reduced: all-reduce them and divide by the "
    "number of ranks."
)


@RULE.explains_parameters(Precedence.WRITTEN_OUTSIDE_STEP)
def _written(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    root = attempt.agreement.rewritten.get(module)
    if root is None or root.key.step > first.key.step:
        return None
    return Explanation(
        cause=f"written {_when(attempt, root)}, {_by_which_ranks(root)}", root=root, fix=_fix(attempt, root)
    )


@RULE.explains_parameters(Precedence.UNEXPLAINED - 10)
def _perhaps_written(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """All ranks wrote different values, but the parameters before that had not been compared."""
    root = attempt.agreement.rewritten_differently.get(module)
    if root is None or root.key.step > first.key.step:
        return None
    cause = (
        f"written {_when(attempt, root)}, {_by_which_ranks(root)}; the parameters after the step before were not "
        "compared, so that they may have differed already"
    )
    return Explanation(cause=cause, root=root, fix=_fix(attempt, root))


def _window(attempt: Attempt, root: Disagreement) -> str:
    """The part of the step in which all ranks that are known to have written did so; empty if they differ."""
    module = root.key.module
    ranks = attempt.of_module(module).values()
    windows = {rank.writes[module] for rank in ranks if module in rank.writes}
    return windows.pop() if len(windows) == 1 else ""


def _fix(attempt: Attempt, root: Disagreement) -> str:
    window = _window(attempt, root)
    if window and is_stored_as(window, WriteWindow.IN_FORWARD):
        return _FIX_IN_FORWARD
    if window and is_stored_as(window, WriteWindow.AFTER_BACKWARD):
        return _FIX_BEFORE_STEP
    return _FIX


def _when(attempt: Attempt, root: Disagreement) -> str:
    window = _window(attempt, root)
    if window and not is_stored_as(window, WriteWindow.BEFORE_FORWARD):
        return reason_text(window)
    return "between two steps" if root.key.step > 0 else "between wrapping and the first step"


def _by_which_ranks(root: Disagreement) -> str:
    ranks = _writers(root)
    if set(ranks) == set(root.key.module[0]):
        return "on all ranks but differently"
    return f"by {name_ranks(ranks)} only"


def _writers(root: Disagreement) -> tuple[int, ...]:
    """The ranks that wrote to their parameters before a step; the digests of the others are of the step before."""
    return tuple(sorted(rank for rank, record in root.digests.items() if record.stage == root.key.stage))


@RULE.explains_parameters(Precedence.NO_OPTIMIZER)
def _no_optimizer(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """No step of a torch optimizer was observed: the job updates its parameters itself."""
    if first.key.optimizer >= 0:
        return None
    backwards = {
        rank: reason_text(record.how)
        for rank, record in first.digests.items()
        if isinstance(record, DigestRecord)
    }
    not_reduced = {rank: how for rank, how in backwards.items() if how not in ("", SYNCED)}
    cause = "updated outside optimizer.step()"
    if not_reduced:
        how = not_reduced[min(not_reduced)]
        how = "no backward() ran before the update" if how == "none" else how
        cause += f" from gradients that DDP did not reduce: {how}"
    return Explanation(
        cause=cause,
        evidence={"last_backward": {str(rank): how for rank, how in backwards.items()}},
        fix=_FIX_BY_HAND if not_reduced else "",
    )


@RULE.explains_parameters(Precedence.FROZEN_PARAMETERS)
def _frozen(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """An optimizer step cannot make parameters diverge that no optimizer holds."""
    differing = differing_tensors(attempt, first)
    stepped = {
        index
        for rank in attempt.of_module(module).values()
        for (_, key), record in rank.optimizers.items()
        if key == module
        for group in record.groups
        for index in group
    }
    if not stepped or not differing or any(index in stepped for index in differing):
        return None
    return Explanation(cause="no optimizer steps these parameters")


def find(context: RuleContext) -> list[Finding]:
    return [_finding(context, divergence) for divergence in context.diverged_parameters(RULE)]


def _finding(context: RuleContext, divergence: Divergence) -> Finding:
    first, root = divergence.first, divergence.root or divergence.first
    evidence = {**divergence.evidence, **of_disagreement(context.attempt, first, context.folder)}
    names = evidence["parameters"]["names"]
    if divergence.root is not None:
        writers = _writers(root)
        evidence["rewritten_on_ranks"] = list(writers)
        message = (
            f"Replicas diverge before step {root.key.step}: {name_ranks(writers)} wrote to the parameters outside "
            "any optimizer."
        )
    else:
        message = (
            f"At step {first.key.step}, {evidence['parameters']['count']} parameters differ across ranks although "
            f"no optimizer steps them: other code wrote to them. Outlier: {name_ranks(first.outlier_ranks())}."
        )
    return context.finding(
        RULE,
        message,
        disagreement=root,
        step=root.key.step,
        parameter=names[0] if names else None,
        ranks=root.outlier_ranks() if len(root.groups()) > 1 else first.outlier_ranks(),
        evidence=evidence,
        cause=divergence.cause,
        fix=divergence.fix or _FIX,
    )
