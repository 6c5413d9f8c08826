"""DDP207: ranks took a different number of steps."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.aggregate.agreement import Disagreement, groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.analysis.divergence.explain import (
    Divergence,
    Explanation,
    Precedence,
    recreated_optimizer,
    stepped_parameters,
    undigested_windows,
)
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import RankStatus
from ddpcheck.analysis.sharding.settings import shard_steps
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP207",
    severity=Severity.ERROR,
    title="Ranks took a different number of steps",
    summary="ranks took a different number of steps",
    replicas_diverge=True,
    location=Location.STEP,
)

_FIX = (
    "Let all ranks decide together whether to step (reduce the flag first), give every rank the same number "
    "of batches, or train inside DDP's join()."
)


@RULE.explains_parameters(Precedence.SKIPPED_STEP)
def _skipped_step(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation | None:
    """Ranks ran a different number of forwards before the same step: a rank skipped a step or took an extra one."""
    root = attempt.agreement.forwards.get(module)
    # A skipped step makes the parameters diverge at once; an older difference has other reasons.
    if root is None or root.key.step != first.key.step or attempt.joined(module):
        return None
    cause, ranks = _by_reductions(attempt, module, root) or _by_majority(root)
    forwards = {str(rank): record.forward for rank, record in root.digests.items()}
    return Explanation(cause=cause, root=root, evidence={"forwards_before_step": forwards}, ranks=ranks)


def _by_reductions(
    attempt: Attempt, module: ModuleKey, root: Disagreement
) -> tuple[str, tuple[int, ...]] | None:
    """All ranks reduce together. A rank that applies more reductions at once skipped a step; one that applies none
    took an extra step."""
    applied = attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.GRADIENTS).first
    same_step = applied is not None and (applied.key.step, applied.key.optimizer) == (
        root.key.step,
        root.key.optimizer,
    )
    candidates = [applied] if applied is not None and same_step else undigested_windows(attempt, root.key)
    for window in candidates:
        reductions = {
            rank: record.synced
            for rank, record in window.digests.items()
            if isinstance(record, AppliedRecord)
        }
        fewest = min(reductions.values())
        if fewest == max(reductions.values()):
            continue
        ranks = tuple(
            sorted(
                rank for rank, count in reductions.items() if (count == 0 if fewest == 0 else count > fewest)
            )
        )
        return f"a step was {'added' if fewest == 0 else 'skipped'} on {name_ranks(ranks)}", ranks
    return None


def _by_majority(root: Disagreement) -> tuple[str, tuple[int, ...]]:
    """The outliers skipped or added a step; all ranks if there is no majority."""
    forwards = {rank: record.forward or 0 for rank, record in root.digests.items()}
    groups = groups_of({rank: str(count) for rank, count in forwards.items()})
    outliers = outlier_ranks([ranks for _, ranks in groups])
    skipped = tuple(rank for rank in outliers if forwards[rank] > min(forwards.values()))
    added = tuple(rank for rank in outliers if forwards[rank] < max(forwards.values()))
    if len(outliers) < len(forwards) and skipped and not added:
        return f"a step was skipped on {name_ranks(skipped)}", outliers
    if len(outliers) < len(forwards) and added and not skipped:
        return f"a step was added on {name_ranks(added)}", outliers
    return f"a step was skipped on {name_ranks(skipped)}, or added on {name_ranks(added)}", outliers


def find(context: RuleContext) -> list[Finding]:
    findings = [finding for module in context.modules() for finding in _of_module(context, module)]
    return findings or _of_shards(context)


def _of_shards(context: RuleContext) -> list[Finding]:
    """Steps of parameters without replica. No digest shows that some ranks did not update their part."""
    finished = {row.rank for row in context.with_status(RankStatus.FINISHED)}
    findings = []
    for (name, where), steps in shard_steps(context.attempt).items():
        groups = groups_of({rank: str(count) for rank, count in steps.items()})
        if len(groups) < 2 or not steps.keys() <= finished:
            continue
        if not all(context.attempt.ranks[rank].counts_steps for rank in steps):
            continue
        counts = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in groups)
        findings.append(
            context.finding(
                RULE,
                f"Ranks took a different number of steps with {name} ({counts}). Each rank updates its own shards, so "
                "parts of the model are some steps behind.",
                stage=Stage.PARAMS.value,
                ranks=outlier_ranks([ranks for _, ranks in groups]),
                evidence={
                    "steps": {str(rank): count for rank, count in steps.items()},
                    "where": where,
                    "replicas_agree": True,
                },
                cause="some ranks took more steps than others",
                fix=_FIX,
            )
        )
    return findings


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    divergence = context.divergence(module).parameters
    if divergence is not None and divergence.code == RULE.code:
        return [_diverged(context, divergence)]
    # DDP206 reports an optimizer that only some ranks step.
    if divergence is not None and "second_optimizer_on_ranks" in divergence.evidence:
        return []
    # A recreated optimizer counts its steps from zero; DDP206 reports it.
    if context.attempt.joined(module) or recreated_optimizer(context.attempt, module) is not None:
        return []
    return _totals(context, module)


def _diverged(context: RuleContext, divergence: Divergence) -> Finding:
    root = divergence.root or divergence.first
    groups = groups_of({rank: str(record.forward or 0) for rank, record in root.digests.items()})
    counts = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in groups)
    return context.finding(
        RULE,
        f"Replicas diverge {divergence.when}: {divergence.cause}. "
        f"Ranks ran a different number of forwards before this step ({counts}).",
        disagreement=divergence.first,
        ranks=divergence.ranks,
        evidence={
            **divergence.evidence,
            **of_disagreement(context.attempt, divergence.first, context.folder),
            **divergence.compared_evidence(),
        },
        cause=divergence.cause,
        fix=_FIX,
    )


def _totals(context: RuleContext, module: ModuleKey) -> list[Finding]:
    """Compares totals only if all ranks finished: a rank that was stopped could not take its last steps."""
    finished = {row.rank for row in context.with_status(RankStatus.FINISHED)}
    if not set(module[0]) <= finished:
        return []
    if not all(context.attempt.ranks[rank].counts_steps for rank in module[0]):
        return []
    if _received(context.attempt, module):
        return []
    optimizers = {
        optimizer
        for data in context.attempt.of_module(module).values()
        for key, optimizer in data.steps
        if key == module
    }
    findings = []
    for optimizer in sorted(optimizers):
        steps = _steps(context.attempt, module, optimizer)
        if _is_sharded(context.attempt, module, optimizer, steps):
            continue
        groups = groups_of({rank: str(count) for rank, count in steps.items()})
        if len(groups) < 2:
            continue
        counts = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in groups)
        findings.append(
            context.finding(
                RULE,
                f"Ranks took a different number of optimizer steps ({counts}).",
                module=module,
                step=min(steps.values()),
                stage=Stage.PARAMS.value,
                ranks=outlier_ranks([ranks for _, ranks in groups]),
                evidence={"steps": {str(rank): count for rank, count in steps.items()}},
                cause="some ranks took more steps than others",
                fix=_FIX,
            )
        )
    return findings


def _is_sharded(attempt: Attempt, module: ModuleKey, optimizer: int, steps: Mapping[int, int]) -> bool:
    """Whether ranks that take no step with this optimizer hold none of its parameters, and replicas stay equal.

    Each rank of a sharded step has an optimizer of its own part, and a part may be empty.
    """
    params = attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS)
    reunions = attempt.agreement.reunions.get(module)
    if params.first is not None or reunions is None or not reunions.count:
        return False
    held = stepped_parameters(attempt, module, optimizer)
    counts = {count for rank, count in steps.items() if held.get(rank)}
    return len(set(held.values())) == len(held) and len(counts) == 1


def _received(attempt: Attempt, module: ModuleKey) -> bool:
    """Whether some ranks have no optimizer and receive the result of every step: by a broadcast, for example."""
    with_optimizer = {
        number: any(key == module and optimizer >= 0 for key, optimizer in rank.steps)
        for number, rank in attempt.of_module(module).items()
    }
    if len(set(with_optimizer.values())) < 2:
        return False
    compared, differing = attempt.agreement.received.get(module, (0, 0))
    final = {rank.final.get(module) for rank in attempt.of_module(module).values()}
    return len(final) == 1 and compared > 0 and 2 * differing <= compared


def _steps(attempt: Attempt, module: ModuleKey, optimizer: int) -> dict[int, int]:
    """Steps by rank; empty if they are not comparable.

    If the budget leaves out parameters at the end, digests do not show the last steps, but the rank counts them. Nodes
    may leave out different steps.
    """
    costs = attempt.collector(CostCollector)
    ranks = {number: attempt.ranks[number] for number in module[0]}
    digested = {number: rank.steps.get((module, optimizer), 0) for number, rank in ranks.items()}
    sparse = {number: costs.last_interval(number) for number in ranks}
    if set(sparse.values()) == {1}:
        return digested
    if any(number not in costs.ranks for number in ranks):
        return {}
    if all(len(rank.steps) == 1 and not rank.faults for rank in ranks.values()):
        return {number: max(count, costs.steps_beyond_digests(number)) for number, count in digested.items()}
    return digested if len(set(sparse.values())) == 1 else {}
