"""DDP501: memory is uneven across ranks, or grows step by step."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.memory.checks import has_sharded_state, uneven_ranks
from ddpcheck.analysis.memory.collector import MemoryGrowth, RankMemory
from ddpcheck.formatting import name_ranks, size_text

LEAST_ELSEWHERE = 64 << 20
MOST_TOLD = 16


def find(case: RuleContext) -> list[Finding]:
    ranks = case.attempt.memory.ranks
    growing = {rank: found for rank, memory in sorted(ranks.items()) if (found := memory.growth())}
    if growing:
        # What grows on some ranks only makes them uneven too.
        return [_growing(case, growing)]
    misplaced = {
        rank: held
        for rank, memory in sorted(ranks.items())
        if sum((held := memory.elsewhere()).values()) >= LEAST_ELSEWHERE
    }
    return [_misplaced(case, misplaced)] if misplaced else _uneven(case, ranks)


def _growing(case: RuleContext, growing: Mapping[int, MemoryGrowth]) -> Finding:
    rank = max(growing, key=lambda each: growing[each].per_step)
    growth = growing[rank]
    ahead = size_text(1000 * growth.per_step)
    which = f"on rank {rank} " if len(growing) > 1 else ""
    return case.finding(
        "DDP501",
        f"Memory of {name_ranks(tuple(growing))} grows all the time: {which}by "
        f"{size_text(growth.per_step)} a step, from {size_text(growth.first)} at step {growth.first_step} to "
        f"{size_text(growth.last)} at step {growth.last_step}. At that rate 1,000 more steps take {ahead}.",
        severity=Severity.WARNING,
        step=growth.last_step,
        ranks=tuple(growing),
        evidence={
            "bytes_a_step": {str(r): round(g.per_step) for r, g in list(growing.items())[:MOST_TOLD]},
            "first": growth.first,
            "last": growth.last,
        },
        cause="something of every step is kept: a loss or an output that still holds its graph, a list that is "
        "never emptied, a cache without a limit",
        fix="Keep numbers instead of tensors (loss.item(), or loss.detach()), and empty what collects per step.",
    )


def _misplaced(case: RuleContext, misplaced: Mapping[int, Mapping[str, int]]) -> Finding:
    rank, held = next(iter(misplaced.items()))
    device, size = max(held.items(), key=lambda item: item[1])
    others = tuple(other for other in misplaced if other != rank)
    return case.finding(
        "DDP501",
        f"Rank {rank} holds {size_text(size)} on {device}, which is not its own device "
        f"({case.attempt.memory.ranks[rank].device})." + (f" So do {name_ranks(others)}." if others else ""),
        severity=Severity.WARNING,
        ranks=tuple(misplaced),
        evidence={"elsewhere": {str(r): dict(h) for r, h in list(misplaced.items())[:MOST_TOLD]}},
        cause="a checkpoint was loaded to the device it was saved from, or tensors were made before "
        "torch.cuda.set_device",
        fix='Load with map_location="cpu" or to this rank\'s device, and call torch.cuda.set_device(local_rank) '
        "first of all.",
    )


def _uneven(case: RuleContext, ranks: Mapping[int, RankMemory]) -> list[Finding]:
    found = uneven_ranks(ranks, has_sharded_state(case.attempt))
    if not found:
        return []
    worst = max(found, key=lambda each: each.level)
    part = f" Most of the difference is {worst.part}." if worst.part else ""
    return [
        case.finding(
            "DDP501",
            f"Rank {worst.rank} holds {size_text(worst.level)} after a step, where {size_text(worst.usual)} "
            f"are usual: {size_text(worst.level - worst.usual)} more.{part}",
            severity=Severity.WARNING,
            ranks=tuple(each.rank for each in found),
            evidence={
                "bytes": {str(rank): memory.level for rank, memory in sorted(ranks.items())[:MOST_TOLD]},
                "part": worst.part,
            },
            cause=f"{worst.part} are not the same size on all ranks"
            if worst.part
            else "this rank keeps something that the others do not: a loaded checkpoint, collected results, a cache",
            fix="Let go of what is not needed (del checkpoint), or deal the work out evenly: the fullest rank sets "
            "the batch size of all.",
        )
    ]
