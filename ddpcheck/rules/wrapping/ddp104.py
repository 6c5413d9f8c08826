"""DDP104: a parameter was added, replaced or unfrozen after wrapping."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import (
    Divergence,
    Explanation,
    Precedence,
    same_parameter_names,
)
from ddpcheck.analysis.evidence import differing_tensors, of_disagreement, tensor_rows
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP104",
    severity=Severity.ERROR,
    title="A parameter was added, replaced or unfrozen after wrapping",
    summary="a parameter was added, replaced or unfrozen after wrapping",
    live=True,
    replicas_diverge=True,
    location=Location.WRAPPING,
)

_FIX = "Wrap the model in DDP again after the change, or create all parameters and set requires_grad before wrapping."
_MOST_CHANGES = 10
_RENAMED = "parameters were renamed after wrapping on some ranks only (pruning, parametrizations)"


@RULE.explains_parameters(Precedence.UNKNOWN_TO_REDUCER)
def _unknown_to_reducer(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    changes = [
        record
        for rank in attempt.of_module(module).values()
        for key, record in rank.structure
        if key == module and record.step <= first.key.step
    ]
    rows = tensor_rows(attempt, first)
    differing = {rows[index][0] for index in differing_tensors(attempt, first) if index < len(rows)}
    for record in changes:
        if record.parameter in differing or not differing:
            return Explanation(
                cause=record.change,
                parameter=record.parameter,
                evidence={"change": record.change, "noticed_at_step": record.step},
            )
    return None


@RULE.explains_gradients(Precedence.NOT_REDUCED - 5)
def _gradients_of_renamed(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """Ranks list other names, so that digests of all gradients differ although the gradients may be equal."""
    renamed = _renamed_on(attempt, module)
    if (
        renamed is None
        or min(attempt.ranks[rank].first_revision[module] for rank in renamed) > first.key.step
    ):
        return None
    return Explanation(cause=_RENAMED, ranks=renamed)


def _renamed_on(attempt: Attempt, module: ModuleKey) -> tuple[int, ...] | None:
    """The ranks on which parameters have other names than at wrapping, if not all ranks have the same names now."""
    ranks = attempt.of_module(module)
    if not same_parameter_names(attempt, module) or any(
        key == module for data in ranks.values() for key, _ in data.structure
    ):
        return None
    now = {rank: [str(row[0]) for row in data.latest[module].parameters] for rank, data in ranks.items()}
    before = [str(row[0]) for row in next(iter(ranks.values())).as_wrapped[module].parameters]
    if len({tuple(names) for names in now.values()}) < 2 or len({len(names) for names in now.values()}) > 1:
        return None
    renamed = tuple(rank for rank, names in now.items() if names != before)
    return renamed if all(module in attempt.ranks[rank].first_revision for rank in renamed) else None


def _renamed(context: RuleContext, module: ModuleKey, ranks: tuple[int, ...]) -> Finding:
    data = context.attempt.ranks[ranks[0]]
    before = {str(row[0]) for row in data.as_wrapped[module].parameters}
    now = {str(row[0]) for row in data.latest[module].parameters}
    old, new = sorted(before - now), sorted(now - before)
    buffers = {str(row[0]) for row in data.latest[module].buffers} - {
        str(row[0]) for row in data.as_wrapped[module].buffers
    }
    example = f"{old[0]} is {new[0]} there" if old and new else "they have another order there"
    also = f", and {min(buffers)} is a buffer on {name_ranks(ranks)} only" if buffers else ""
    step = min(context.attempt.ranks[rank].first_revision[module] for rank in ranks)
    return context.finding(
        RULE,
        f"Before step {step}, parameters were renamed after wrapping on {name_ranks(ranks)} only: {example}{also}. "
        "From there on, ranks run different modules, and gradients and parameters are not compared.",
        module=module,
        step=step,
        parameter=old[0] if old else None,
        ranks=ranks,
        evidence={
            "names_before": old[:_MOST_CHANGES],
            "names_now": new[:_MOST_CHANGES],
            "new_buffers": sorted(buffers),
        },
        cause=_RENAMED,
        fix="Prune, parametrize or rename modules on every rank in the same way, with masks that are equal on all "
        "ranks, and before wrapping.",
    )


def find(context: RuleContext) -> list[Finding]:
    return [finding for module in context.modules() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    divergence = context.divergence(module).parameters
    renamed = _renamed_on(context.attempt, module)
    if renamed is not None and (divergence is None or divergence.code == RULE.code):
        return [_renamed(context, module, renamed)]
    if divergence is not None and divergence.code == RULE.code:
        return [_diverged(context, divergence)]
    return _no_divergence_yet(context, module)


def _diverged(context: RuleContext, divergence: Divergence) -> Finding:
    return context.finding(
        RULE,
        f"{divergence.parameter} was {divergence.cause} after wrapping, so DDP does not reduce its gradients. "
        f"Replicas diverge at step {divergence.step}.",
        disagreement=divergence.first,
        parameter=divergence.parameter,
        evidence={
            **of_disagreement(context.attempt, divergence.first, context.folder),
            **divergence.evidence,
        },
        cause=f"{divergence.cause} after wrapping",
        fix=_FIX,
    )


def _no_divergence_yet(context: RuleContext, module: ModuleKey) -> list[Finding]:
    """The ranks still agree, perhaps because the user reduces that gradient: a note."""
    changes = {
        (record.parameter, record.change): record
        for data in context.attempt.of_module(module).values()
        for key, record in data.structure
        if key == module
    }
    if not changes:
        return []
    (parameter, change), record = next(iter(changes.items()))
    ranks = tuple(
        rank
        for rank, data in context.attempt.of_module(module).items()
        if any(key == module for key, _ in data.structure)
    )
    return [
        context.finding(
            RULE,
            f"{parameter} was {change} after wrapping on {name_ranks(ranks)}, so DDP does not reduce its gradients. "
            "The ranks still agreed wherever they were compared.",
            severity=Severity.NOTE,
            module=module,
            step=record.step,
            parameter=parameter,
            ranks=ranks,
            evidence={
                "changes": [{"parameter": name, "change": how} for name, how in list(changes)[:_MOST_CHANGES]]
            },
            cause=f"{change} after wrapping",
            fix=_FIX,
        )
    ]
