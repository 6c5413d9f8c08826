"""DDP501: memory is uneven across ranks, or grows step by step."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.memory.collector import MemoryGrowth, RankMemory
from ddpcheck.analysis.memory.table import has_sharded_state, uneven_ranks
from ddpcheck.formatting import name_ranks, size_text
from ddpcheck.rules.rule import Need, Rule, first_sentence

RULE = Rule(
    code="DDP501",
    severity=Severity.WARNING,
    title="Memory is uneven across ranks, or grows step by step",
    summary="memory is uneven across ranks, or grows step by step",
    needs=(Need.MEMORY,),
    headline=first_sentence,
    order=604.5,
)

_LEAST_ELSEWHERE = 64 << 20
_MOST_RANKS = 16


def find(context: RuleContext) -> list[Finding]:
    ranks = context.attempt.memory.ranks
    growing = {rank: growth for rank, memory in sorted(ranks.items()) if (growth := memory.growth())}
    if growing:
        # Growth on some ranks also makes memory uneven.
        return [_growing(context, growing)]
    misplaced = {
        rank: held
        for rank, memory in sorted(ranks.items())
        if sum((held := memory.elsewhere()).values()) >= _LEAST_ELSEWHERE
    }
    return [_misplaced(context, misplaced)] if misplaced else _uneven(context, ranks)


def _growing(context: RuleContext, growing: Mapping[int, MemoryGrowth]) -> Finding:
    rank = max(growing, key=lambda each: growing[each].per_step)
    growth = growing[rank]
    predicted = size_text(1000 * growth.per_step)
    which = f"on rank {rank} " if len(growing) > 1 else ""
    return context.finding(
        RULE,
        f"Memory of {name_ranks(tuple(growing))} grows steadily, {which}by {size_text(growth.per_step)} per step. It "
        f"grew from {size_text(growth.first)} at step {growth.first_step} to {size_text(growth.last)} at step "
        f"{growth.last_step}; 1,000 more steps would need {predicted} more.",
        step=growth.last_step,
        ranks=tuple(growing),
        evidence={
            "bytes_a_step": {str(r): round(g.per_step) for r, g in list(growing.items())[:_MOST_RANKS]},
            "first": growth.first,
            "last": growth.last,
        },
        cause="the job keeps something from every step: a loss or an output with its graph, a list that is "
        "never cleared, a cache without a limit, or a buffer that is still filling up",
        fix="Keep numbers instead of tensors (loss.item() or loss.detach()), and clear what accumulates per step.",
    )


def _misplaced(context: RuleContext, misplaced: Mapping[int, Mapping[str, int]]) -> Finding:
    rank, held = next(iter(misplaced.items()))
    device, size = max(held.items(), key=lambda item: item[1])
    others = tuple(other for other in misplaced if other != rank)
    return context.finding(
        RULE,
        f"Rank {rank} holds {size_text(size)} on {device}, which is not its own device "
        f"({context.attempt.memory.ranks[rank].device})."
        + (f" So do {name_ranks(others)}." if others else ""),
        ranks=tuple(misplaced),
        evidence={"elsewhere": {str(r): dict(h) for r, h in list(misplaced.items())[:_MOST_RANKS]}},
        cause="a checkpoint was loaded to the device it was saved from, or tensors were created before "
        "torch.cuda.set_device",
        fix='Load with map_location="cpu" or to this rank\'s device, and call torch.cuda.set_device(local_rank) '
        "before anything else.",
    )


def _uneven(context: RuleContext, ranks: Mapping[int, RankMemory]) -> list[Finding]:
    uneven = uneven_ranks(ranks, has_sharded_state(context.attempt))
    if not uneven:
        return []
    worst = max(uneven, key=lambda each: each.level)
    part = f" Most of the difference is {worst.part}." if worst.part else ""
    return [
        context.finding(
            RULE,
            f"Rank {worst.rank} holds {size_text(worst.level)} after a step, {size_text(worst.level - worst.usual)} "
            f"more than the median of {size_text(worst.usual)}.{part}",
            ranks=tuple(each.rank for each in uneven),
            evidence={
                "bytes": {str(rank): memory.level for rank, memory in sorted(ranks.items())[:_MOST_RANKS]},
                "part": worst.part,
            },
            cause=f"{worst.part} are not the same size on all ranks"
            if worst.part
            else "this rank keeps something that the others do not: a loaded checkpoint, collected results, a cache",
            fix="Free what is not needed (del checkpoint), or distribute the work evenly: the rank with the highest "
            "memory limits the batch size of all.",
        )
    ]
