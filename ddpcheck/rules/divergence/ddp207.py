"""DDP207: ranks took a different number of steps."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.optimizers import made_anew
from ddpcheck.analysis.divergence.parameters import Divergence, divergence
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.report import RankStatus
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage

FIX = (
    "Let all ranks decide together whether to step (reduce the flag first), give every rank the same number "
    "of batches, or train inside DDP's join()."
)


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    parted = divergence(case.attempt, module)
    if parted is not None and parted.code == "DDP207":
        return [_left_out(case, parted)]
    # With an optimizer made anew on some rank each counts for itself; DDP206 tells.
    if case.attempt.joined(module) or made_anew(case.attempt, module) is not None:
        return []
    return _totals(case, module)


def _left_out(case: RuleContext, parted: Divergence) -> Finding:
    root = parted.root or parted.found
    forwards = {rank: record.forward or 0 for rank, record in root.digests.items()}
    groups = groups_of({rank: str(count) for rank, count in forwards.items()})
    told = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in groups)
    evidence = {**parted.evidence, **of_disagreement(case.attempt, parted.found, case.folder)}
    return case.finding(
        "DDP207",
        f"Step {root.moment.step} came after another number of forwards on some rank ({told}): {parted.cause}, "
        "and the parameters part with it.",
        found=parted.found,
        ranks=parted.ranks,
        evidence=evidence,
        cause=parted.cause,
        fix=FIX,
    )


def _totals(case: RuleContext, module: ModuleKey) -> list[Finding]:
    """Only ranks that ended on their own count: one that was stopped could not take its last steps."""
    finished = {row.rank for row in case.with_status(RankStatus.FINISHED)}
    if not set(module[0]) <= finished:
        return []
    if not all(case.attempt.ranks[rank].counts_steps for rank in module[0]):
        return []
    optimizers = {
        o for data in case.attempt.of_module(module).values() for key, o in data.steps if key == module
    }
    findings = []
    for optimizer in sorted(optimizers):
        steps = {rank: case.attempt.ranks[rank].steps.get((module, optimizer), 0) for rank in module[0]}
        groups = groups_of({rank: str(count) for rank, count in steps.items()})
        if len(groups) < 2:
            continue
        told = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in groups)
        findings.append(
            case.finding(
                "DDP207",
                f"Ranks took a different number of optimizer steps ({told}).",
                module=module,
                step=min(steps.values()),
                stage=Stage.PARAMS.value,
                ranks=outlier_ranks([ranks for _, ranks in groups]),
                evidence={"steps": {str(rank): count for rank, count in steps.items()}},
                cause="some ranks stepped more often than others",
                fix=FIX,
            )
        )
    return findings
