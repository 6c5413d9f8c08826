"""DDP206: optimizers differ across ranks."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement, groups_of, outlier_ranks
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
from ddpcheck.analysis.sharding.settings import (
    SettingsDifference,
    described_differently,
    settings_differences,
    unreplicated,
)
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
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
_FIX_ORDER = (
    "Pass the parameters to the optimizer in the same order and in the same groups on every rank: iterate over "
    "named_parameters(), never over sets, and keep conditions that depend on the rank out of it."
)
_FIX_MISSING = (
    "Give the optimizer the same parameters on every rank: do not choose them by the rank or by its data."
)
_FIX_GROUPS = (
    "Build the same parameter groups on every rank: keep add_param_group() and conditions on names out of code that "
    "depends on the rank or on its data."
)
_FIX_SECOND = "Step the same optimizers on every rank, in the same order, or on none."
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
    cause, fix = _difference(attempt, root, rows)
    return Explanation(cause=cause, root=root, evidence={"hyperparameters": rows}, fix=fix)


def _difference(attempt: Attempt, root: Disagreement, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Cause and fix. Values of a group that only some ranks have are no difference of their own."""
    groups = _group_counts(attempt, root)
    shared = rows
    if len(groups) > 1:
        fewest = min(int(count) for count, _ in groups)
        shared = [row for row in rows if row["group"] is None or row["group"] < fewest]
    names = ", ".join(sorted({row["name"] for row in shared}))
    if len(groups) < 2:
        return _without_scaler(rows) or f"hyperparameters differ: {names}", ""
    counts = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in groups)
    cause = f"optimizers have different numbers of parameter groups ({counts})"
    return cause + (f", and hyperparameters differ: {names}" if names else ""), _FIX_GROUPS


def _without_scaler(rows: list[dict[str, Any]]) -> str:
    """What to say where only some ranks have a GradScaler that scales; empty: that is not the difference."""
    scales: dict[str, Any] = next((row["by_rank"] for row in rows if row["group"] is None), {})
    off = [int(rank) for rank, scale in scales.items() if scale is None]
    if len(rows) > 1 or not off or len(off) == len(scales):
        return ""
    return f"GradScaler is off on {name_ranks(off)} only: hyperparameters differ: GradScaler.scale"


def _group_counts(attempt: Attempt, root: Disagreement) -> list[tuple[str, tuple[int, ...]]]:
    """Ranks by the number of parameter groups of their optimizer at that step."""
    counts = {}
    for rank in root.digests:
        values = attempt.ranks[rank].hyper_at(root.key.optimizer, root.key.step)
        groups = {name.partition(".")[0] for name, value in values.items() if value is not None}
        counts[rank] = str(sum(group.isdigit() for group in groups))
    return groups_of(counts)


@RULE.explains_parameters(Precedence.WRITTEN_OUTSIDE_STEP - 5)
def _second_optimizer(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """An optimizer steps the module on some ranks only, beside one that all ranks step.

    Its first step must come before the divergence and after the last step at which the parameters were equal.
    """
    if recreated_optimizer(attempt, module) is not None:
        return None
    ranks = attempt.of_module(module)
    first_steps = {
        number: {owner: begun for (key, owner), begun in rank.first_steps.items() if key == module}
        for number, rank in ranks.items()
    }
    shared = set.intersection(*(set(steps) for steps in first_steps.values())) if first_steps else set()
    if first.key.optimizer not in shared or set(first_steps) & attempt.agreement.impaired:
        return None
    # Each rank of a sharded step has optimizers of its own.
    if all(set(steps) - shared for steps in first_steps.values()):
        return None
    agreed = attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS).agreed_before(first.key)
    by_rank = {}
    for number, steps in first_steps.items():
        digest = first.digests.get(number)
        until = (digest.forward or 0) if isinstance(digest, DigestRecord) else 0
        # Forwards are counted, of which a step may have several.
        since = (agreed + 1) * until / (first.key.step + 1)
        own = {owner for owner in set(steps) - shared if since <= steps[owner] <= until}
        if own:
            by_rank[number] = own
    if not by_rank:
        return None
    example = min(by_rank)
    record = ranks[example].optimizers.get((min(by_rank[example]), module))
    what = (
        f"{record.name}{f' at {record.where}' if record.where else ''}"
        if record is not None
        else "an optimizer"
    )
    return Explanation(
        cause=f"a second optimizer ({what}) steps parameters of the module on {name_ranks(tuple(by_rank))} only",
        ranks=tuple(sorted(by_rank)),
        evidence={"second_optimizer_on_ranks": sorted(by_rank)},
        fix=_FIX_SECOND,
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
        return Explanation(
            cause="parameters in another order or other groups", evidence=evidence, fix=_FIX_ORDER
        )
    rank = min(missing)
    ranks = [other for other, indices in missing.items() if indices == missing[rank]]
    rows = tensor_rows(attempt, first)
    names = [str(rows[index][0]) for index in sorted(missing[rank]) if index < len(rows)]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    shown = ", ".join(names[:_MOST_NAMES])
    cause = f"the optimizer does not hold {shown}{more} on {name_ranks(ranks)}, but does on other ranks"
    return Explanation(cause=cause, evidence=evidence, fix=_FIX_MISSING)


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
    findings = [finding for module in context.modules() for finding in _of_module(context, module)]
    return findings + ([] if findings else _of_shards(context))


def _of_shards(context: RuleContext) -> list[Finding]:
    """Shards have no replica that could diverge, or the ranks that differ hold other shards."""
    findings = [_shard_settings(context, difference) for difference in settings_differences(context.attempt)]
    for module in unreplicated(context.attempt):
        differing = described_differently(context.attempt, module)
        if differing:
            findings.append(_described(context, module, differing))
    return findings


def _shard_settings(context: RuleContext, difference: SettingsDifference) -> Finding:
    rows = difference.rows()
    names = ", ".join(sorted({row["name"] for row in rows}))
    groups = groups_of({rank: repr([row["by_rank"][str(rank)] for row in rows]) for rank in difference.ranks})
    return context.finding(
        RULE,
        f"From step {difference.step} on, hyperparameters of {difference.name} differ across ranks: {names}. Each rank "
        "updates its shards with its own values, so parts of the model are trained differently.",
        step=difference.step,
        stage=Stage.PARAMS.value,
        ranks=outlier_ranks([ranks for _, ranks in groups]),
        evidence={"hyperparameters": rows, "replicas_agree": True},
        cause=f"hyperparameters differ: {names}",
        fix=_FIX,
    )


def _described(context: RuleContext, module: ModuleKey, differing: dict[str, dict[int, str]]) -> Finding:
    name, by_rank = next(iter(differing.items()))
    groups = [ranks for _, ranks in groups_of(by_rank)]
    values = "; ".join(f"{name_ranks(ranks)}: {by_rank[ranks[0]]}" for ranks in groups)
    more = f" and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
    return context.finding(
        RULE,
        f"Ranks step shards of different parameters: {name}{more} ({values}).",
        parameter=name,
        ranks=outlier_ranks(groups),
        evidence={
            "parameters": {
                key: {str(rank): text for rank, text in row.items()} for key, row in differing.items()
            },
            "replicas_agree": True,
        },
        cause="parameters differ in dtype, shape or training across ranks, or are missing on some",
        fix="Build the model, freeze its layers and create the optimizer in the same way on every rank.",
    )


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    divergence = context.divergence(module).parameters
    if divergence is not None:
        return [_diverged(context, divergence)] if divergence.code == RULE.code else []
    recreated = recreated_optimizer(context.attempt, module)
    if recreated is not None:
        return [_recreated(context, module, recreated)]
    root = context.attempt.agreement.hyper.get(module)
    if root is None:
        return []
    if _is_sharded(context.attempt, module, root.key.optimizer):
        return [_sharded(context, root)]
    return [_no_divergence_yet(context, root)]


def _diverged(context: RuleContext, divergence: Divergence) -> Finding:
    first = divergence.first
    evidence = {**divergence.evidence, **of_disagreement(context.attempt, first, context.folder)}
    evidence |= divergence.compared_evidence()
    names = evidence["parameters"]["names"]
    return context.finding(
        RULE,
        f"Replicas diverge {divergence.when}: {divergence.cause}. "
        f"Outlier: {name_ranks(divergence.ranks or first.outlier_ranks())}.",
        disagreement=first,
        ranks=divergence.ranks or first.outlier_ranks(),
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=divergence.cause,
        fix=divergence.fix or _FIX,
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


def _sharded(context: RuleContext, root: Disagreement) -> Finding:
    """Each rank steps its own part of the parameters and broadcasts it: replicas stay equal, and are wrong."""
    rows = _hyperparameter_rows(context.attempt, root)
    names = ", ".join(sorted({row["name"] for row in rows}))
    return context.finding(
        RULE,
        f"From step {root.key.step} on, hyperparameters of a sharded optimizer differ across ranks: {names}. Each rank "
        "updates its part of the parameters with its own values and broadcasts the result, so replicas agree, but "
        "parts of the model are trained differently.",
        disagreement=root,
        ranks=tuple(sorted(root.digests)),
        evidence={"hyperparameters": rows, "replicas_agree": True},
        cause=f"hyperparameters differ: {names}",
        fix=_FIX,
    )


def _no_divergence_yet(context: RuleContext, root: Disagreement) -> Finding:
    params = context.attempt.agreement.stats_of(root.key.module, Stage.PARAMS, TensorKind.PARAMETERS)
    exact = params.agreed_before(root.key) + 1 >= root.key.step
    rows = _hyperparameter_rows(context.attempt, root)
    cause, fix = _difference(context.attempt, root, rows)
    return context.finding(
        RULE,
        f"From step {root.key.step} {'on' if exact else 'at the latest'}, optimizers differ across ranks: {cause}. "
        "The parameters do not differ yet.",
        severity=Severity.NOTE,
        disagreement=root,
        ranks=tuple(sorted(root.digests)),
        evidence={"hyperparameters": rows},
        cause=cause,
        fix=fix or _FIX,
    )
