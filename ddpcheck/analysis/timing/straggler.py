"""Stragglers: ranks that the others wait for, by how much, and in which phase.

Uses durations only: clocks of two hosts are never compared. A straggler must show in two ways: its own work takes
longer than the others', and the others wait longer than it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median

from ddpcheck.analysis.timing.model import RankTime, Refaults, Straggler
from ddpcheck.analysis.timing.rank_series import BUSY, AlignedSteps

# Minimum share of a step spent in the kernel.
REFAULTS_LEAST_SHARE = 0.15
# Upper bound of the time of one page fault, including virtual machines.
MOST_US_A_FAULT = 10
# Environment variables that make glibc keep its memory.
KEEPS_MEMORY = "MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_MMAP_THRESHOLD_=33554432"


def may_be_faults(kernel_us: float, faults: float) -> bool:
    """True if page faults can explain the kernel time, rather than reading or sending."""
    return faults * MOST_US_A_FAULT >= kernel_us


def refaults_in(ranks: Sequence[RankTime]) -> Refaults | None:
    """Refaults of the most affected rank; None if no rank loses much time."""
    refaults = [each for row in ranks if (each := _of_rank(row)) is not None]
    return max(refaults, key=lambda each: each.share, default=None)


def _of_rank(row: RankTime) -> Refaults | None:
    if row.kernel_us is None or row.faults is None or not row.step.mean_us:
        return None
    share = row.kernel_us / row.step.mean_us
    if share < REFAULTS_LEAST_SHARE or not may_be_faults(row.kernel_us, row.faults):
        return None
    return Refaults(row.rank, row.faults, round(share, 4))


# Minimum cost for the others: schedulers cause smaller delays in healthy jobs.
LEAST_COST_US = 2000
LEAST_SHARE = 0.05
# Minimum duration of the measurement: the assignment of CPU cores changes from time to time.
LEAST_SPAN_US = 1_000_000
# Minimum share of the steps in which the others wait longer, and minimum share in which the phase takes longer. Not all
# steps: sometimes another rank is even later. Ranks that are late in turn reach only a half.
OFTEN = 0.75
MOSTLY = 0.8
# Number of intervals of the run, in each of which the delay must show.
INTERVALS = 4
# Minimum share of the delay that the rank's own work explains, and maximum share of a lack of CPUs.
EXPLAINED = 0.5


def straggler_in(together: AlignedSteps) -> Straggler | None:
    """The stragglers, if there are any."""
    ranks = together.ranks
    if len(ranks) < 2 or not _long_enough(together):
        return None
    late = _late_ranks(together)
    others = tuple(rank for rank in ranks if rank not in late)
    delays = _delays(together, late, others)
    cost = median(delays)
    step = median(together.columns[others[0]]["total"])
    if cost < max(LEAST_COST_US, LEAST_SHARE * step) or not _steady(delays, cost, OFTEN):
        return None
    more = {part: _more(together, part, late, others) for part in BUSY}
    excess = {part: median(amounts) for part, amounts in more.items()}
    part = max(excess, key=lambda name: excess[name])
    if sum(excess.values()) < EXPLAINED * cost or not _steady(more[part], excess[part], MOSTLY):
        return None
    return Straggler(
        ranks=late,
        cost_us=round(cost),
        share=round(cost / step, 4),
        part=part,
        own_us=round(_typical(together, part, late)),
        others_us=round(_typical(together, part, others)),
        excess_us={name: round(value) for name, value in excess.items()},
        steps_late=sum(delay > 0 for delay in delays),
        queued_us=_counted_more(together, "queued", late, others, median),
        faults=_counted_more(together, "faults", late, others, mean),
        # The kernel may count in ticks, which are longer than many steps.
        kernel_us=_counted_more(together, "kernel", late, others, mean),
    )


def lacks_processors(straggler: Straggler) -> bool:
    """True if a lack of CPUs explains the delay, as on a host with too many threads."""
    return straggler.queued_us is not None and straggler.queued_us > EXPLAINED * straggler.cost_us


def faults_memory_in(straggler: Straggler) -> bool:
    """True if repeated page faults explain the delay."""
    kernel, faults = straggler.kernel_us, straggler.faults
    return (
        kernel is not None
        and faults is not None
        and kernel > EXPLAINED * straggler.cost_us
        and may_be_faults(kernel, faults)
    )


def _long_enough(together: AlignedSteps) -> bool:
    rank = together.ranks[0]
    return sum(together.columns[rank]["total"]) * together.every >= LEAST_SPAN_US


def _late_ranks(together: AlignedSteps) -> tuple[int, ...]:
    """At most half of the ranks: those below the widest gap between the ranks' typical waits."""
    waits = {rank: median(together.columns[rank]["wait"]) for rank in together.ranks}
    ordered = sorted(waits, key=lambda rank: waits[rank])
    sizes = range(1, len(ordered) // 2 + 1)
    size = max(sizes, key=lambda n: waits[ordered[n]] - waits[ordered[n - 1]])
    return tuple(sorted(ordered[:size]))


def _delays(together: AlignedSteps, late: Sequence[int], others: Sequence[int]) -> list[float]:
    """By step, how much longer the others typically waited than any straggler.

    Not the least of the others' waits: of many ranks, some other one is held up in almost every step.
    """
    waits = {rank: together.columns[rank]["wait"] for rank in together.ranks}
    return [
        median(waits[rank][step] for rank in others) - max(waits[rank][step] for rank in late)
        for step in range(len(together.steps))
    ]


def _steady(amounts: Sequence[float], typical: float, share: float) -> bool:
    """True if it occurs in that share of the steps, and in every interval of the run."""
    if sum(amount > 0 for amount in amounts) < share * len(amounts):
        return False
    size = len(amounts) // INTERVALS
    intervals = [amounts[number * size : (number + 1) * size] for number in range(INTERVALS)]
    return all(median(interval) >= typical / 4 for interval in intervals)


def _more(together: AlignedSteps, name: str, late: Sequence[int], others: Sequence[int]) -> list[float]:
    """By step, the excess of the stragglers over the others."""
    columns = {rank: together.columns[rank][name] for rank in together.ranks}
    return [
        median(columns[rank][step] for rank in late) - median(columns[rank][step] for rank in others)
        for step in range(len(together.steps))
    ]


def _typical(together: AlignedSteps, part: str, ranks: Sequence[int]) -> float:
    return median(median(together.columns[rank][part]) for rank in ranks)


def _counted_more(
    together: AlignedSteps,
    name: str,
    late: Sequence[int],
    others: Sequence[int],
    average: Callable[[Sequence[float]], float],
) -> int | None:
    """The excess of the stragglers; None if a system does not report it."""
    if any(min(together.columns[rank][name]) < 0 for rank in together.ranks):
        return None
    return round(average(_more(together, name, late, others)))
