"""DDP101: parameters or buffers differ across ranks after wrapping."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.nodes import apart_findings
from ddpcheck.analysis.divergence.parameters import names_agree
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind


def find(case: RuleContext) -> list[Finding]:
    found = [
        finding
        for module in case.modules()
        if names_agree(case.attempt, module)
        for of in (TensorKind.PARAMETERS, TensorKind.BUFFERS)
        for finding in _of_module(case, module, of)
    ]
    found += [finding for module in case.modules() for finding in _ignored(case, module)]
    return found + apart_findings(case, "DDP101")


def _of_module(case: RuleContext, module: ModuleKey, of: TensorKind) -> list[Finding]:
    found = case.attempt.agreement.stats_of(module, Stage.INIT_AFTER, of).first
    if found is None:
        return []
    evidence = of_disagreement(case.attempt, found, case.folder)
    options = case.attempt.ranks[min(found.digests)].latest[module].options
    cause = _cause(options, of)
    differing = evidence["parameters"]
    names = differing["names"]
    message = (
        f"Right after DDP wrapped the model, {differing['count']} of {differing['of']} {of.value} are not "
        f"the same on all ranks; odd: {name_ranks(found.outlier_ranks())}."
    )
    return [
        case.finding(
            "DDP101",
            message,
            found=found,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause=cause,
            fix="Let DDP broadcast at wrapping (leave init_sync and buffer broadcasting on), or load or seed "
            "the same values on every rank before wrapping.",
        )
    ]


def _ignored(case: RuleContext, module: ModuleKey) -> list[Finding]:
    """What DDP ignores may differ, unless ranks apply the same gradients to it: then it is meant to be a replica."""
    found = case.attempt.agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.IGNORED).first
    applied = case.attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.IGNORED)
    if found is None or not applied.compared or applied.differing:
        return []
    evidence = of_disagreement(case.attempt, found, case.folder)
    names = evidence["parameters"]["names"]
    evidence["steps_with_equal_gradients"] = applied.compared
    return [
        case.finding(
            "DDP101",
            f"Right after wrapping, {len(names)} parameters that DDP leaves alone are not the same on all ranks, and "
            f"yet every rank applies the same gradients to them; odd: {name_ranks(found.outlier_ranks())}.",
            found=found,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause="DDP was told to ignore these parameters, so it did not broadcast them at wrapping",
            fix="Broadcast ignored parameters from one rank after wrapping, or build them from the same seed "
            "everywhere.",
        )
    ]


def _cause(options: dict[str, object], of: TensorKind) -> str:
    if options.get("init_sync") is False:
        return "init_sync=False: DDP was told not to broadcast at wrapping"
    if of is TensorKind.BUFFERS and options.get("broadcast_buffers") is False:
        return "broadcast_buffers=False: DDP was told to leave buffers alone, also at wrapping"
    return "the broadcast at wrapping did not make the ranks equal"
