"""DDP211: parameters that an optimizer trains outside of DDP diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.sharding.mesh import MESH, coordinates_of, coordinates_text
from ddpcheck.analysis.unwrapped.judgement import (
    Basis,
    UnwrappedDifference,
    stepped_difference,
    unwrapped_modules,
)
from ddpcheck.formatting import name_ranks
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import COPIED, PARTIAL, ModuleRole
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP211",
    severity=Severity.ERROR,
    title="Parameters trained outside DDP diverge",
    summary="parameters that an optimizer trains outside DDP diverge: no one reduces their gradients",
    # Not live: parameters that the job averages now and then agree again later.
    replicas_diverge=True,
    location=Location.STEP,
)

_WRAP = (
    "Put them into the module that you wrap: make one module of the model, its heads and its loss weights, and wrap "
    "that. Or wrap each part in DDP of its own. If you reduce their gradients yourself, do it for every parameter, "
    "before each step and over all ranks."
)

_SAME_BACKWARD = "their gradients come from the same backward as those of the shards, but no one reduces them"
_IGNORED = f"left out by the wrapper (ignored_params), or added after it was applied: {_SAME_BACKWARD}"
_FIX_IGNORED = (
    "Take them out of ignored_params (ignored_states), or all-reduce their gradients over all ranks."
)
_PARTIAL = (
    "sharded on a part of the mesh only: other parameters of the same optimizer are on all of its dimensions, and no "
    "one reduces the gradients of these along the others"
)
_FIX_PARTIAL = "Give fully_shard the same mesh for all modules, for example the one with replicas and shards."
_NO_ROOT = (
    "in no module that fully_shard or replicate was applied to, such as a root that was not wrapped: "
    f"{_SAME_BACKWARD}"
)
_FIX_NO_ROOT = (
    "After its submodules, apply fully_shard (replicate) to the root module as well, before you create the optimizer: "
    "it takes all parameters that are left."
)


def find(context: RuleContext) -> list[Finding]:
    findings = [
        stepped_difference(context.attempt, module)
        for module in unwrapped_modules(context.attempt, ModuleRole.STEPPED)
    ]
    replicas = set(context.modules())
    ignored = [_ignored(context, module) for module in replicas if not is_unwrapped(module)]
    return [each for each in ignored if each is not None] + [
        _finding(context, difference)
        for difference in findings
        # A job without DDP whose gradients agree: the general rules examine it like a wrapped module.
        if difference is not None and (difference.module not in replicas or difference.from_start)
    ]


def _ignored(context: RuleContext, module: ModuleKey) -> Finding | None:
    """Parameters that DDP ignores were equal after wrapping, and each rank applies its own gradients to them."""
    attempt = context.attempt
    start = attempt.agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.IGNORED)
    applied = attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.IGNORED)
    first = applied.first
    if first is None or start.first is not None or not start.compared:
        return None
    evidence = of_disagreement(attempt, first, context.folder)
    names, count = evidence["parameters"]["names"], evidence["parameters"]["count"]
    reduced = _equal_gradients(first)
    return context.finding(
        RULE,
        f"From step {first.key.step} on, ranks apply different gradients to {count} of the parameters that DDP "
        "ignores, which were equal after wrapping."
        + ("" if reduced else " Nothing shows that they have to stay equal, so this is not judged."),
        severity=None if reduced else Severity.NOTE,
        disagreement=first,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause="DDP is configured to ignore them, and no one reduces their gradients"
        + (f": those of {reduced} other ignored parameters are reduced" if reduced else ""),
        fix="All-reduce the gradients of all ignored parameters, or take them out of the list."
        if reduced
        else "Nothing, if each rank is meant to have its own. Otherwise take them out of the list of ignored "
        "parameters, or all-reduce their gradients.",
    )


def _equal_gradients(first: Disagreement) -> int:
    """How many ignored parameters have the same gradient on all ranks."""
    records = [record for record in first.digests.values() if isinstance(record, DigestRecord)]
    rows = [unpack_leaves(record.leaves, record.width) for record in records]
    return sum(len(set(leaves)) == 1 and any(leaves[0]) for leaves in zip(*rows, strict=False))


def _finding(context: RuleContext, difference: UnwrappedDifference) -> Finding:
    first = difference.first
    evidence = of_disagreement(context.attempt, first, context.folder)
    record = next(iter(context.attempt.of_module(difference.module).values())).latest[difference.module]
    names = [str(record.parameters[index][0]) for index in difference.differing]
    coordinates = coordinates_of(context.attempt, difference.module, difference.module[0])
    if coordinates:
        evidence[MESH] = {str(rank): row for rank, row in coordinates.items()}
    if record.where:
        evidence["called_at"] = record.where
    evidence["optimizer"] = record.name
    differing = evidence["parameters"]
    judged = difference.basis is not Basis.NONE
    subject = f"{names[0]} and {len(names) - 1} more parameters" if len(names) > 1 else (names or ["?"])[0]
    agreeing = len(record.parameters) - len(names)
    cause, fix = _cause(context.attempt, difference, agreeing, record.mesh, names)
    return context.finding(
        RULE,
        f"{record.name} trains {subject} outside DDP, and {_when(difference)} "
        f"{differing['count']} of {differing['of']} of its unwrapped parameters differ across ranks. "
        f"Outlier: {name_ranks(first.outlier_ranks())}."
        + ("" if judged else " Nothing shows that they have to be equal, so this is not judged.")
        + (f" {coordinates_text(coordinates)}" if coordinates else ""),
        severity=None if judged else Severity.NOTE,
        # The module is not in the report's list of DDP modules.
        step=first.key.step,
        stage=first.key.stage,
        parameter=names[0] if names else None,
        ranks=first.outlier_ranks(),
        evidence=evidence,
        cause=cause,
        fix=fix,
    )


def _subgroups(attempt: Attempt, difference: UnwrappedDifference) -> str:
    ranks = difference.module[0]
    stats = attempt.collector(ManualReductionCollector).stats.get(difference.module)
    known = [] if stats is None else [partly_reduced_text(each, ranks) for each in stats.partly.values()]
    groups = tuple(ranks for _, ranks in difference.first.groups())
    from_groups = partly_reduced_text(PartlyReduced(difference.first.key.step, groups=groups), ranks)
    text = next(filter(None, known), from_groups)
    return f"gradients are {text}" if text.startswith("reduced") else text


def _when(difference: UnwrappedDifference) -> str:
    if difference.from_start:
        return "from the beginning"
    return f"after step {difference.first.key.step}"


def _cause(
    attempt: Attempt,
    difference: UnwrappedDifference,
    agreeing: int,
    mesh: Mapping[str, Any],
    names: Sequence[str],
) -> tuple[str, str]:
    start = "; they also had different values at the first step" if difference.from_start else ""
    if mesh.get("kind") == PARTIAL and difference.basis in (Basis.SHARED_BACKWARD, Basis.OTHERS_REDUCED):
        return _PARTIAL + start, _FIX_PARTIAL
    if "inside" in mesh and difference.basis in (Basis.SHARED_BACKWARD, Basis.OTHERS_REDUCED):
        if set(names) <= set(mesh["inside"]):
            return _IGNORED + start, _FIX_IGNORED
        if not set(names) & set(mesh["inside"]):
            return _NO_ROOT + start, _FIX_NO_ROOT
    causes: dict[Basis, str] = {
        Basis.SHARED_BACKWARD: "trained outside DDP: their gradients come from the same backward as those of a DDP "
        f"module, but no one reduces them{start}",
        Basis.OTHERS_REDUCED: f"its gradients are not reduced, those of other parameters are ({agreeing} parameters "
        "of the same optimizer agree)",
        Basis.SAME_GRADIENTS: "every rank applies the same gradients, but the parameters had different values "
        "before the first step"
        if difference.from_start
        else "every rank has applied the same gradients in some steps, but not in all",
        Basis.SUBGROUPS: _subgroups(attempt, difference),
    }
    copy = "a copy" if mesh.get("kind") == COPIED else "a part of a copy"
    causes[Basis.COPIED] = (
        f"the optimizer of each rank steps {copy} of them, and the ranks do not put the same values back"
    )
    causes[Basis.SPLIT_DATA] = (
        "the model is not wrapped in DDP: the samplers give each rank its part of the data, and nothing reduces "
        "gradients or makes the parameters equal"
    )
    cause = causes.get(difference.basis)
    if cause is not None:
        fix = _WRAP
        if difference.basis is Basis.COPIED:
            fix = "After each step, copy the same values back on every rank, and write nothing else to them."
        if difference.basis is Basis.SPLIT_DATA:
            fix = "Wrap the model before you create the optimizer: model = DistributedDataParallel(model)."
        if difference.from_start and difference.basis is Basis.SAME_GRADIENTS:
            fix = "Broadcast them from one rank before the first step, or initialise them from the same seed."
        return cause, fix
    return (
        "each rank trains them alone, in a backward that reaches no DDP module",
        "Nothing, if each rank is meant to have its own. Otherwise wrap them in DDP.",
    )
