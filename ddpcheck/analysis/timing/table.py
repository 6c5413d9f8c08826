"""Time tables, one for each set of ranks that synchronize, and stragglers: ranks that the others wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median

from ddpcheck.analysis.timing.collector import BUSY, PARTS, AlignedSteps, StepTimeSeries, align_steps
from ddpcheck.analysis.timing.model import (
    CrossCheck,
    RankTime,
    Refaults,
    Scaling,
    Spent,
    Straggler,
    TimeTable,
)

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
    """The stragglers, if there are any.

    Uses durations only: clocks of two hosts are never compared. A straggler must show in two ways: its own work takes
    longer than the others', and the others wait longer than it does.
    """
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


def measured_us(table: TimeTable) -> int:
    """The duration of the steps of a table, on its first rank."""
    return table.ranks[0].step.mean_us * table.steps * table.every


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


COMPUTE = ("forward", "backward", "optimizer")
# Points of each rank's time series, and of all ranks together.
MOST_POINTS = 64
LEAST_POINTS = 8
MOST_NUMBERS = 8192


def time_tables(
    series: Mapping[int, StepTimeSeries], groups: Iterable[tuple[int, ...]]
) -> tuple[TimeTable, ...]:
    """Groups with a rank without step times are left out."""
    distinct = list(dict.fromkeys(groups))
    tables = [
        _table(group, {rank: series[rank] for rank in group})
        for group in distinct
        if all(rank in series for rank in group)
    ]
    return tuple(table for table in tables if table is not None)


def _table(group: tuple[int, ...], series: Mapping[int, StepTimeSeries]) -> TimeTable | None:
    together = align_steps(series)
    if together is None:
        return None
    last = together.last_arrivals()
    on_device = all(clock.device for clock in series.values())
    ranks = tuple(_rank(together, rank, last[rank], series[rank].ddp) for rank in together.ranks)
    return TimeTable(
        group=group,
        steps=len(together.steps),
        first_step=together.steps[0],
        last_step=together.steps[-1],
        every=together.every,
        pauses=together.pauses,
        clock="device" if on_device else "host",
        step_us=round(median(median(together.columns[rank]["total"]) for rank in together.ranks)),
        ranks=ranks,
        scaling=_scaling(together),
        straggler=straggler_in(together),
        cross_check=_cross_check(together, series),
        refaults=None if on_device else refaults_in(ranks),
    )


def _rank(together: AlignedSteps, rank: int, last: int, ddp: Mapping[str, int]) -> RankTime:
    columns = together.columns[rank]
    step_mean = together.mean(rank, "total")
    return RankTime(
        rank=rank,
        step=_spent(columns["total"], step_mean),
        parts={name: _spent(columns[name], step_mean) for name in PARTS},
        last_arrivals=last,
        watching_us=round(together.mean(rank, "watching")),
        queued_us=_counted(together, rank, "queued"),
        faults=_counted(together, rank, "faults"),
        kernel_us=_counted(together, rank, "kernel"),
        ddp_us=dict(ddp),
        course_us=_course(columns["total"], len(together.ranks)),
    )


def _counted(together: AlignedSteps, rank: int, name: str) -> int | None:
    """A count by the system; None if unknown."""
    return None if min(together.columns[rank][name]) < 0 else round(together.mean(rank, name))


def _course(column: Sequence[int], ranks: int) -> tuple[int, ...]:
    points = min(len(column), MOST_POINTS, max(LEAST_POINTS, MOST_NUMBERS // ranks))
    ends = [len(column) * number // points for number in range(points + 1)]
    return tuple(max(column[first:end]) for first, end in pairwise(ends))


def _spent(column: Sequence[int], step_mean: float) -> Spent:
    average = sum(column) / len(column)
    return Spent(
        median_us=round(median(column)),
        p90_us=sorted(column)[(len(column) * 9) // 10],
        mean_us=round(average),
        share=round(average / step_mean, 4) if step_mean else 0.0,
    )


def _cross_check(together: AlignedSteps, series: Mapping[int, StepTimeSeries]) -> CrossCheck | None:
    """Compare with DDP's own averages; it has one of overlap only if there was overlap."""
    averages = [series[rank].ddp for rank in together.ranks]
    if not all("communication" in each for each in averages):
        return None
    return CrossCheck(
        wait_us=round(mean(together.mean(rank, "wait") for rank in together.ranks)),
        ddp_wait_us=round(mean(max(0, each["communication"] - each.get("overlap", 0)) for each in averages)),
    )


def _scaling(together: AlignedSteps) -> Scaling:
    """A single rank would neither communicate nor wait: its step would be the rest."""
    ranks = together.ranks
    step = mean(together.mean(rank, "total") for rank in ranks)

    def share(*parts: str) -> float:
        return mean(sum(together.mean(rank, part) for part in parts) for rank in ranks) / step

    exposed = mean(together.shortest_waits()) / step
    waiting = share("wait") - exposed
    efficiency = 1 - share("wait")
    return Scaling(
        compute=round(share(*COMPUTE), 4),
        data=round(share("data"), 4),
        other=round(share("other"), 4),
        exposed_communication=round(exposed, 4),
        waiting_for_stragglers=round(waiting, 4),
        efficiency=round(efficiency, 4),
        speed_up=round(efficiency * len(ranks), 3),
    )
