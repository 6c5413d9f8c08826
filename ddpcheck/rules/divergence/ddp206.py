"""DDP206: optimizers differ across ranks."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement, groups_of
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import (
    Divergence,
    Explanation,
    Precedence,
    RecreatedOptimizer,
    recreated_optimizer,
    stepped_parameters,
)
from ddpcheck.analysis.evidence import of_disagreement, tensor_rows
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP206",
    severity=Severity.ERROR,
    title="Optimizers differ across ranks",
    summary="optimizers differ: hyperparameters, state, scale",
    needs=(Need.HYPERPARAMETERS,),
    live=True,
    replicas_diverge=True,
    location=Location.STEP,
)

_FIX = (
    "Compute learning rates and scales from values that are equal on every rank (reduce the metric first, or "
    "broadcast rank 0's decision), and load optimizer state on every rank."
)
# Part of the name of torch's optimizer that keeps the state of different parameters on each rank.
_SHARDED = "ZeroRedundancy"
_MOST_NAMES = 3


@RULE.explains_parameters(Precedence.GRADIENT_SCALE)
def _scales(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    explanation = _hyperparameters(attempt, module, first)
    rows = explanation.evidence["hyperparameters"] if explanation is not None else []
    return explanation if any(row["group"] is None for row in rows) else None


@RULE.explains_parameters(Precedence.HYPERPARAMETERS)
def _hyperparameters(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    root = attempt.agreement.hyper.get(module)
    if root is None or root.key.step > first.key.step:
        return None
    rows = _hyperparameter_rows(attempt, root)
    names = sorted({row["name"] for row in rows})
    return Explanation(
        cause="hyperparameters differ: " + ", ".join(names), root=root, evidence={"hyperparameters": rows}
    )


@RULE.explains_parameters(Precedence.PARAMETER_GROUPS)
def _parameter_groups(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """The optimizers hold the same parameters in another order or in other groups, or not the same parameters."""
    optimizer = first.key.optimizer
    texts = {
        number: repr(record.groups)
        for number, rank in attempt.of_module(module).items()
        for (owner, key), record in rank.optimizers.items()
        if key == module and owner == optimizer
    }
    groups = groups_of(texts)
    if len(groups) < 2:
        return None
    evidence = {"parameter_order": [{"ranks": list(ranks), "groups": text} for text, ranks in groups]}
    held = stepped_parameters(attempt, module, optimizer)
    union = frozenset().union(*held.values())
    missing = {rank: union - indices for rank, indices in held.items() if indices < union}
    if not missing:
        return Explanation(cause="parameters in another order or other groups", evidence=evidence)
    rank = min(missing)
    ranks = [other for other, indices in missing.items() if indices == missing[rank]]
    rows = tensor_rows(attempt, first)
    names = [str(rows[index][0]) for index in sorted(missing[rank]) if index < len(rows)]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    shown = ", ".join(names[:_MOST_NAMES])
    cause = f"the optimizer does not hold {shown}{more} on {name_ranks(ranks)}, but does on other ranks"
    return Explanation(cause=cause, evidence=evidence)


@RULE.explains_parameters(Precedence.OPTIMIZER_STATE)
def _state(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    root = attempt.agreement.stats_of(module, Stage.STATE, TensorKind.STATE).first
    if root is None or root.key.step > first.key.step:
        return None
    return Explanation(cause="optimizer state differs before the step", root=root)


@RULE.explains_parameters(Precedence.LOADED_STATE)
def _loaded_state(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """Some ranks reached the step with a state, or a newly loaded one, and the others did not."""
    keys = [
        partial.key
        for partial in attempt.agreement.partial_state
        if partial.key.module == module and partial.key.step <= first.key.step
    ]
    steps = [(key.optimizer, key.step) for key in keys]
    for root in attempt.agreement.partial_state:
        # If other ranks hold other parts at the same step, the state is sharded.
        only = steps.count((root.key.optimizer, root.key.step)) == 1
        silent = set(module[0]) - set(root.digests)
        if root.key not in keys or not only or silent & attempt.agreement.impaired:
            continue
        if _is_sharded(attempt, module, root.key.optimizer):
            continue
        ranks = tuple(sorted(root.digests))
        return Explanation(
            cause=f"optimizer state was loaded on {name_ranks(ranks)} only",
            root=root,
            evidence={"state_loaded_on_ranks": list(ranks)},
        )
    return None


def _is_sharded(attempt: Attempt, module: ModuleKey, optimizer: int) -> bool:
    records = [rank.optimizers.get((optimizer, module)) for rank in attempt.of_module(module).values()]
    return any(record is not None and _SHARDED in record.name for record in records)


def _hyperparameter_rows(attempt: Attempt, root: Disagreement) -> list[dict[str, Any]]:
    """Each hyperparameter that differs across ranks, with its values."""
    key = root.key
    values = {rank: attempt.ranks[rank].hyper_at(key.optimizer, key.step) for rank in root.digests}
    rows = []
    for name in sorted({name for of_rank in values.values() for name in of_rank}):
        by_rank = {str(rank): of_rank.get(name) for rank, of_rank in values.items()}
        if len({repr(value) for value in by_rank.values()}) > 1:
            group, _, short = name.partition(".")
            is_scaler = not group.isdigit()
            rows.append(
                {
                    "optimizer": key.optimizer,
                    "group": None if is_scaler else int(group),
                    "name": name if is_scaler else short,
                    "by_rank": by_rank,
                }
            )
    return rows


def find(context: RuleContext) -> list[Finding]:
    return [finding for module in context.modules() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    divergence = context.divergence(module).parameters
    if divergence is not None:
        return [_diverged(context, divergence)] if divergence.code == RULE.code else []
    recreated = recreated_optimizer(context.attempt, module)
    if recreated is not None:
        return [_recreated(context, module, recreated)]
    root = context.attempt.agreement.hyper.get(module)
    return [] if root is None else [_no_divergence_yet(context, root)]


def _diverged(context: RuleContext, divergence: Divergence) -> Finding:
    first = divergence.first
    evidence = {**divergence.evidence, **of_disagreement(context.attempt, first, context.folder)}
    evidence |= divergence.compared_evidence()
    names = evidence["parameters"]["names"]
    return context.finding(
        RULE,
        f"Replicas diverge {divergence.when}: {divergence.cause}. "
        f"Outlier: {name_ranks(first.outlier_ranks())}.",
        disagreement=first,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=divergence.cause,
        fix=_FIX,
    )


def _recreated(context: RuleContext, module: ModuleKey, recreated: RecreatedOptimizer) -> Finding:
    result = (
        "The parameters differ across ranks at the end."
        if recreated.diverged
        else "The steps after that could not be compared."
    )
    return context.finding(
        RULE,
        f"From step {recreated.step} on, ranks step with different optimizers: one was recreated on some ranks only. "
        f"{result} Outlier: {name_ranks(recreated.ranks)}.",
        severity=Severity.ERROR if recreated.diverged else Severity.NOTE,
        module=module,
        step=recreated.step,
        stage=Stage.PARAMS.value,
        ranks=recreated.ranks,
        evidence={"optimizers_differ_from_step": recreated.step},
        cause="an optimizer was recreated on some ranks only: its state (momenta, step counts) starts empty there",
        fix="Create a new optimizer on every rank or on none. To start over, decide on one rank and broadcast the "
        "decision.",
    )


def _no_divergence_yet(context: RuleContext, root: Disagreement) -> Finding:
    params = context.attempt.agreement.stats_of(root.key.module, Stage.PARAMS, TensorKind.PARAMETERS)
    exact = params.agreed_before(root.key) + 1 >= root.key.step
    return context.finding(
        RULE,
        f"From step {root.key.step} {'on' if exact else 'at the latest'}, hyperparameters differ across ranks. "
        "The parameters do not differ yet.",
        severity=Severity.NOTE,
        disagreement=root,
        ranks=tuple(sorted(root.digests)),
        evidence={"hyperparameters": _hyperparameter_rows(context.attempt, root)},
        cause="hyperparameters differ",
        fix=_FIX,
    )
