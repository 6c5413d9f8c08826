"""DDP101: parameters or buffers differ across ranks after wrapping."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_sharded, is_unwrapped
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import node_findings, same_parameter_names
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP101",
    severity=Severity.ERROR,
    title="Parameters or buffers differ across ranks after wrapping",
    summary="parameters or buffers differ across ranks after wrapping",
    needs=(Need.PARAMETERS_AFTER_WRAPPING,),
    live=True,
    replicas_diverge=True,
    location=Location.WRAPPING,
)


def find(context: RuleContext) -> list[Finding]:
    findings = [
        finding
        for module in context.modules()
        # Parameters outside of DDP that differ from the start are a finding of DDP211.
        if same_parameter_names(context.attempt, module) and not is_unwrapped(module)
        for kind in (TensorKind.PARAMETERS, TensorKind.BUFFERS)
        for finding in _of_module(context, module, kind)
    ]
    findings += [finding for module in context.modules() for finding in _ignored(context, module)]
    return findings + node_findings(context, RULE, Stage.INIT_AFTER)


def _of_module(context: RuleContext, module: ModuleKey, kind: TensorKind) -> list[Finding]:
    first = context.attempt.agreement.stats_of(module, Stage.INIT_AFTER, kind).first
    if first is None:
        return []
    evidence = of_disagreement(context.attempt, first, context.folder)
    options = context.attempt.ranks[min(first.digests)].latest[module].options
    differing = evidence["parameters"]
    names = differing["names"]
    if is_sharded(module):
        return [_shards(context, first, evidence)]
    return [
        context.finding(
            RULE,
            f"After DDP wrapped the model, {differing['count']} of {differing['of']} {kind.value} differ across "
            f"ranks. Outlier: {name_ranks(first.outlier_ranks())}.",
            disagreement=first,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause=_cause(options, kind),
            fix="Let DDP broadcast at wrapping (keep init_sync and buffer broadcasting enabled), or load or seed "
            "the same values on every rank before wrapping.",
        )
    ]


def _shards(context: RuleContext, first: Disagreement, evidence: dict[str, Any]) -> Finding:
    """Compared when an optimizer first steps them. No wrapper of shards broadcasts along replicated dimensions."""
    differing = evidence["parameters"]
    names = differing["names"]
    return context.finding(
        RULE,
        f"Before the first step, {differing['count']} of {differing['of']} shards differ between ranks that hold "
        f"replicas of each other's shards. Outlier: {name_ranks(first.outlier_ranks())}.",
        disagreement=first,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause="the replicas had different values before they were sharded: fully_shard and replicate of FSDP2 do not "
        "broadcast parameters, and FSDP1 only with sync_module_states=True",
        fix="Initialise from the same seed or load the same checkpoint on every rank, or broadcast the parameters "
        "from one rank before you shard them.",
    )


def _ignored(context: RuleContext, module: ModuleKey) -> list[Finding]:
    """Ignored parameters may differ, unless ranks apply the same gradients to them: then they are replicas."""
    first = context.attempt.agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.IGNORED).first
    applied = context.attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.IGNORED)
    if first is None or not applied.compared or applied.differing:
        return []
    evidence = of_disagreement(context.attempt, first, context.folder)
    names = evidence["parameters"]["names"]
    evidence["steps_with_equal_gradients"] = applied.compared
    return [
        context.finding(
            RULE,
            f"After wrapping, {len(names)} parameters that DDP ignores differ across ranks, although every rank "
            f"applies the same gradients to them. Outlier: {name_ranks(first.outlier_ranks())}.",
            disagreement=first,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause="DDP is configured to ignore these parameters, so it did not broadcast them at wrapping",
            fix="Broadcast ignored parameters from one rank after wrapping, or initialise them from the same seed "
            "on every rank.",
        )
    ]


def _cause(options: dict[str, object], kind: TensorKind) -> str:
    if options.get("init_sync") is False:
        return "init_sync=False: DDP does not broadcast at wrapping"
    if kind is TensorKind.BUFFERS and options.get("broadcast_buffers") is False:
        return "broadcast_buffers=False: DDP does not broadcast buffers, not even at wrapping"
    return "the broadcast at wrapping did not make the ranks equal"
