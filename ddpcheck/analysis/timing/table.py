"""Builds one time table for each set of ranks that synchronize."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median

from ddpcheck.analysis.timing.model import CrossCheck, RankTime, Scaling, Spent, TimeTable
from ddpcheck.analysis.timing.rank_series import PARTS, AlignedSteps, StepTimeSeries, align_steps
from ddpcheck.analysis.timing.straggler import refaults_in, straggler_in

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
