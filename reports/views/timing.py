"""Step time: each rank's mean step by phase, its delay against the median rank, and scaling efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timing.model import CrossCheck, RankTime, Refaults, Scaling, TimeTable
from ddpcheck.analysis.timing.straggler import KEEPS_MEMORY
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.views.table import Column, Row, Table, row

# Phase, the short label for a terminal, and the label where there is room.
PHASES = (
    ("data", "data", "data loading"),
    ("forward", "fwd", "forward"),
    ("backward", "bwd", "backward"),
    ("optimizer", "opt", "optimizer"),
    ("other", "other", "other"),
    ("wait", "wait", "communication and waiting"),
)
_WORK = tuple(phase for phase, _, _ in PHASES if phase != "wait")
# Where the name of a phase would not make a sentence.
_IN_SENTENCE = {"data": "data loading", "other": "code outside forward, backward and optimizer"}


@dataclass(frozen=True)
class StepTimeView:
    """The step times of ranks that synchronise with each other."""

    table: Table
    # " of ranks 0-3" where the job has several groups of ranks.
    suffix: str
    summary: str
    # By rank: the mean of each phase in ms, in the order of PHASES, and the mean wait.
    phases_ms: Mapping[int, tuple[float, ...]]
    # By rank: how much longer than the median rank each phase of WORK takes, in ms; medians over steps.
    delays_ms: Mapping[int, tuple[float, ...]]
    median_step_ms: float
    delay_summary: str

    @property
    def longest_ms(self) -> float:
        return max(map(sum, self.phases_ms.values()), default=0.0)


def step_times(report: Report) -> list[StepTimeView]:
    """One for each group of ranks that synchronise with each other."""
    tables = [table for table in report.time if table.ranks]
    return [_step_times(table, len(report.time) > 1) for table in tables]


def work_phases() -> tuple[str, ...]:
    """The phases in which a rank works, in the order of `delays_ms`."""
    return _WORK


def milliseconds(value: float) -> str:
    """Three significant digits at least."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _step_times(times: TimeTable, several: bool) -> StepTimeView:
    phases = {rank.rank: _phases(rank) for rank in times.ranks}
    delays = _delays(times)
    latest = max(delays, key=lambda rank: sum(delays[rank]))
    return StepTimeView(
        table=_table(times, several, phases),
        suffix=f" of {name_ranks(times.group)}" if several else "",
        summary=_summary(times),
        phases_ms=phases,
        delays_ms=delays,
        median_step_ms=times.step_us / 1000,
        delay_summary=(
            f"Rank {latest} has the largest delay: {milliseconds(sum(delays[latest]))} ms per step over all phases."
        ),
    )


def _table(times: TimeTable, several: bool, phases: Mapping[int, tuple[float, ...]]) -> Table:
    columns = (
        Column("rank"),
        Column("step", number=True),
        *(Column(short, title, number=True) for _, short, title in PHASES),
    )
    waits = {rank.rank: rank.parts["wait"].median_us for rank in times.ranks}
    usual = median(waits.values())
    rows = tuple(_row(rank, phases[rank.rank], abs(waits[rank.rank] - usual)) for rank in times.ranks)
    group = f", {name_ranks(times.group)}" if several else ""
    pauses = f", {times.pauses} with a pause excluded" if times.pauses else ""
    return Table(
        "Step time",
        columns,
        rows,
        subtitle=f"ms, mean of {times.steps} steps{group}{pauses}",
        notes=tuple(_notes(times)),
        noun="ranks",
    )


def _row(rank: RankTime, phases: tuple[float, ...], weight: float) -> Row:
    step = milliseconds(rank.step.mean_us / 1000)
    return row([rank.rank, step, *map(milliseconds, phases)], weight, [rank.rank])


def _phases(rank: RankTime) -> tuple[float, ...]:
    return tuple(rank.parts[phase].mean_us / 1000 for phase, _, _ in PHASES)


def _delays(times: TimeTable) -> dict[int, tuple[float, ...]]:
    usual = {phase: median(rank.parts[phase].median_us for rank in times.ranks) for phase in _WORK}
    return {
        rank.rank: tuple(round((rank.parts[phase].median_us - usual[phase]) / 1000, 4) for phase in _WORK)
        for rank in times.ranks
    }


def _summary(times: TimeTable) -> str:
    text = f"The median step takes {milliseconds(times.step_us / 1000)} ms."
    straggler = times.straggler
    if straggler is None:
        return text
    verb = "is a straggler" if len(straggler.ranks) == 1 else "are stragglers"
    phase = _IN_SENTENCE.get(straggler.part, straggler.part)
    cost = milliseconds(straggler.cost_us / 1000)
    return f"{text} {name_ranks(straggler.ranks).capitalize()} {verb} in {phase}: {cost} ms per step."


def _notes(times: TimeTable) -> list[str]:
    notes = [] if times.refaults is None else [_refaults(times.refaults)]
    if len(times.ranks) > 1:
        notes += _scaling(times.scaling)
        notes += [] if times.cross_check is None else [_cross_check(times.cross_check)]
    return notes


def _refaults(refaults: Refaults) -> str:
    return (
        f"Up to {refaults.faults:,} page faults per step, {100 * refaults.share:.0f} % of the step in the kernel: "
        f"memory is released and allocated again in every step. With {KEEPS_MEMORY} glibc keeps it."
    )


def _scaling(scaling: Scaling) -> list[str]:
    parts = (
        ("compute", scaling.compute),
        ("data", scaling.data),
        ("other", scaling.other),
        ("exposed comm", scaling.exposed_communication),
        ("stragglers", scaling.waiting_for_stragglers),
    )
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in parts)
    return [
        f"Step: {shares}",
        f"Scaling efficiency {100 * scaling.efficiency:.0f} % ({scaling.speed_up:.2f}x one rank)",
    ]


def _cross_check(check: CrossCheck) -> str:
    own, ddp = milliseconds(check.wait_us / 1000), milliseconds(check.ddp_wait_us / 1000)
    return f"Cross-check: mean wait {own} ms, by DDP's own logger {ddp} ms"
