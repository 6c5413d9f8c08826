"""Six figures of a run for the head of the page: each is computed in analysis, and named as in the summary."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.analysis.report import Report
from ddpcheck.config import FIRST_STEPS_OF_BUDGET
from ddpcheck.formatting import counted, name_ranks, percent_text, size_text, time_text
from ddpcheck.reports.views.cost import checks_completely, share_text
from ddpcheck.reports.views.memory import memory_location, memory_rows
from ddpcheck.reports.views.table import CellMark
from ddpcheck.reports.views.timing import exposed_medians, milliseconds

UNKNOWN = "-"
STRAGGLER_CODE = "DDP402"


@dataclass(frozen=True)
class KeyFigure:
    """One figure: what it is, its value, and the statistic or the reason why it is unknown."""

    label: str
    value: str
    detail: str
    mark: CellMark | None = None


def key_figures(report: Report) -> list[KeyFigure]:
    """Always six, so that pages of different runs can be compared side by side."""
    return [
        _agreement(report),
        _step_time(report),
        _exposed(report),
        _stragglers(report),
        _memory(report),
        _cost(report),
    ]


def _agreement(report: Report) -> KeyFigure:
    label = "replicas"
    compared = [check for check in report.checks if check.compared]
    coverage = report.coverage
    of = "" if coverage is None or not coverage.trained else f"{coverage.compared} of {coverage.trained} "
    detail = f"{of}trained parameters compared" if of else f"{counted(len(compared), 'kind')} of comparisons"
    if report.world_size < 2:
        return KeyFigure(label, UNKNOWN, "one rank, nothing to compare")
    if any(check.outcome == "differ" for check in compared):
        return KeyFigure(label, "differ", detail, CellMark.ERROR)
    if not compared:
        return KeyFigure(label, "not compared", detail, CellMark.WARNING)
    if coverage is not None and not coverage.complete:
        return KeyFigure(label, "agree in part", detail, CellMark.WARNING)
    return KeyFigure(label, "agree", detail, CellMark.OK)


def _step_time(report: Report) -> KeyFigure:
    times = max(report.time, key=lambda table: len(table.ranks), default=None)
    if times is None or not times.ranks:
        return KeyFigure("step time", UNKNOWN, "too few steps for a median")
    return KeyFigure(
        "step time",
        f"{milliseconds(times.step_us / 1000)} ms",
        f"median of {counted(times.steps, 'step')}, {counted(len(times.ranks), 'rank')}",
    )


def _exposed(report: Report) -> KeyFigure:
    """From traces if there are some, which see transfers alone; else from the shortest wait of each step."""
    label = "exposed communication"
    profiled = exposed_medians(report.overlap)
    if profiled is not None:
        took = time_text(profiled.transfer_ns)
        return KeyFigure(
            label,
            percent_text(100 * profiled.transfer_share),
            f"{took} of transfers, median of {counted(profiled.steps, 'profiled step')}",
        )
    times = max(report.time, key=lambda table: len(table.ranks), default=None)
    if times is None or len(times.ranks) < 2:
        return KeyFigure(label, UNKNOWN, "not measured")
    share = times.scaling.exposed_communication
    return KeyFigure(label, f"{100 * share:.0f} %", "of the mean step, without waiting for the last rank")


def _stragglers(report: Report) -> KeyFigure:
    stragglers = [table.straggler for table in report.time if table.straggler is not None]
    if stragglers:
        worst = max(stragglers, key=lambda each: each.cost_us)
        cost = milliseconds(worst.cost_us / 1000)
        detail = f"{cost} ms per step, {100 * worst.share:.0f} % of the median step"
        return KeyFigure("straggler", name_ranks(worst.ranks), detail, CellMark.WARNING)
    if STRAGGLER_CODE in report.not_judged:
        return KeyFigure("straggler", "not judged", report.not_judged[STRAGGLER_CODE])
    if not any(len(table.ranks) > 1 for table in report.time):
        return KeyFigure("straggler", UNKNOWN, "too few steps were measured")
    return KeyFigure("straggler", "none", "no rank delays the others steadily")


def _memory(report: Report) -> KeyFigure:
    rows = memory_rows(report)
    if not rows:
        return KeyFigure("peak memory", UNKNOWN, "not recorded")
    highest = max(rows, key=lambda row: row["most"])
    return KeyFigure(
        "peak memory", size_text(highest["most"]), f"{memory_location(rows)}, rank {highest['rank']}"
    )


def _cost(report: Report) -> KeyFigure:
    label, cost = "cost of ddpcheck", report.cost
    if cost is None or not cost.ranks:
        return KeyFigure(label, UNKNOWN, "not recorded")
    took = time_text(round(cost.cost_us * 1000))
    if cost.share is None or checks_completely(cost):
        return KeyFigure(label, took, f"per step; the first {FIRST_STEPS_OF_BUDGET} are checked completely")
    return KeyFigure(label, share_text(cost.share), f"of the mean step, {took} per step")
