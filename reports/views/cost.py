"""What ddpcheck itself took: one line, a table by rank and probe, and the schedule under the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.analysis.cost.collector import is_thinned
from ddpcheck.analysis.cost.model import CostTable, RankCost, SchedulePart
from ddpcheck.analysis.report import Report
from ddpcheck.config import FIRST_STEPS_OF_BUDGET
from ddpcheck.formatting import time_text
from ddpcheck.reports.safe_text import safe_line, shortened
from ddpcheck.reports.views.table import Column, Table, known, row

# Probes with a column of their own.
_MOST_PROBES = 4
_MOST_CHARACTERS = 24
# A rank whose share exceeds the mean by this factor is named.
_NOTABLE = 1.25
# A probe with at least this part of the cost is named alone, otherwise the first two.
_MOSTLY = 0.5
# The verdict names checks only; parameters have a place of their own there.
_IN_VERDICT = {"allreduce_every": "AllReduce", "applied_every": "applied gradients"}
# What the three intervals of a schedule are about, in the order in which the budget thins them out.
_CHECKS = (
    ("allreduce_every", "the AllReduce verified"),
    ("applied_every", "applied gradients compared"),
    ("params_every", "parameters compared"),
)


_MOST_FOLDED = 4


def cost_lines(report: Report) -> list[str]:
    """What ddpcheck took per step, and what was left out to stay below the budget; empty if it is not known."""
    folded = [f for f in [_capitalized(folded_line(report))] if f]
    if report.cost is None:
        return folded
    limit = "the budget" if report.cost.budget is None else f"--budget {report.cost.budget:g} %"
    aim = (
        f"to stay below {limit}"
        if _within_budget(report.cost)
        else f"because ddpcheck takes more than {limit}"
    )
    thinned = [
        f"{_capitalized(text)} {interval} {aim}"
        for check, text in _CHECKS
        if (interval := _interval(report.cost.schedule, check))
    ]
    return [_cost_line(report.cost), *thinned, *folded]


def folded_line(report: Report) -> str:
    """Which steps the records only sum up, empty if there are none. Reports of other runs may have anything there."""
    ranges = report.run.get("folded")
    if not isinstance(ranges, list) or not ranges:
        return ""
    try:
        steps = [f"{first:,} to {last:,}" for first, last in ranges]
    except (TypeError, ValueError):
        return ""
    listed = ", ".join(steps[:_MOST_FOLDED]) + (", …" if len(steps) > _MOST_FOLDED else "")
    return f"steps {listed} were compared while the job ran; of them, the records keep sums and samples (--keep all)"


def left_out_text(report: Report) -> str:
    """For the verdict: the checks that not every step had, empty if every step was checked. The summary has more."""
    schedule = () if report.cost is None else report.cost.schedule
    names = [
        _IN_VERDICT[check]
        for check, _ in _CHECKS
        if check in _IN_VERDICT and any(getattr(part, check) > 1 for part in schedule)
    ]
    return f", {' and '.join(names)} at fewer steps" if names else ""


def thinned_out(report: Report) -> str:
    """All checks that not every step had, with their intervals; empty if every step was checked."""
    schedule = () if report.cost is None else report.cost.schedule
    texts = [f"{text} {interval}" for check, text in _CHECKS if (interval := _interval(schedule, check))]
    return ", ".join(texts)


def parameters_interval(report: Report) -> str:
    """At which steps parameters were compared under the budget; empty if after every step."""
    return "" if report.cost is None else _interval(report.cost.schedule, "params_every")


def share_text(share: float) -> str:
    """`0.8 %`, with two significant digits below ten."""
    percent = 100 * share
    if percent < 0.01:
        return "below 0.01 %" if percent > 0 else "0 %"
    return f"{percent:.2f} %" if percent < 0.1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def cost_table(report: Report) -> Table | None:
    """The cost of each rank by probe; None if it is not known."""
    cost = report.cost
    if cost is None or not cost.ranks:
        return None
    names = list(cost.by_probe)[:_MOST_PROBES]
    further = len(cost.by_probe) > len(names)
    on_device = any(rank.device_us for rank in cost.ranks)
    columns = (
        Column("rank"),
        Column("step", "step without ddpcheck", number=True),
        Column("ddpcheck", number=True),
        Column("share", number=True),
        *(Column(_probe(name), number=True) for name in names),
        *([Column("others", number=True)] if further else []),
        *([Column("device", "kernels on the device", number=True)] if on_device else []),
    )
    rows = tuple(
        row(
            [
                rank.rank,
                _time(rank.step_us),
                _time(rank.cost_us),
                known(rank.share, share_text),
                *(_time(rank.by_probe.get(name, 0.0)) for name in names),
                *([_time(_others(rank, names))] if further else []),
                *([known(rank.device_us, _time)] if on_device else []),
            ],
            rank.share or 0.0,
            [rank.rank],
        )
        for rank in cost.ranks
    )
    return Table(
        "Cost of ddpcheck",
        columns,
        rows,
        subtitle="mean per step in the training thread",
        notes=tuple(cost_lines(report)),
        legend="Share: ddpcheck's time relative to the job's own step. Step times do not include it.",
        noun="ranks",
        total=cost.of,
    )


def schedule_table(report: Report) -> Table | None:
    """How often each check ran, by ranges of steps; None if every step was checked completely."""
    cost = report.cost
    if cost is None or not is_thinned(cost.schedule):
        return None
    columns = (
        Column("steps"),
        Column("AllReduce"),
        Column("applied gradients"),
        Column("parameters"),
        Column("ddpcheck", number=True),
        Column("share", number=True),
    )
    rows = tuple(
        row(
            [
                f"{part.first_step:,} to {part.last_step:,}",
                *(_every(getattr(part, check)) for check, _ in _CHECKS),
                _time(part.cost_us),
                known(part.share, share_text),
            ]
        )
        for part in cost.schedule
    )
    limit = "" if cost.budget is None else f"under --budget {cost.budget:g} %"
    return Table("Steps checked", columns, rows, subtitle=limit, noun="ranges")


def _within_budget(cost: CostTable) -> bool:
    """Whether the share since the last change is below the budget. No schedule achieves that in a very short step."""
    share = cost.schedule[-1].share if cost.schedule else None
    return cost.budget is None or share is None or 100 * share <= cost.budget


def _cost_line(cost: CostTable) -> str:
    text = f"ddpcheck took {_time(cost.cost_us)} per step"
    if checks_completely(cost):
        return f"{text}: it checks the first {FIRST_STEPS_OF_BUDGET} steps completely, and then keeps to its budget"
    if cost.share is not None:
        text += f" ({share_text(cost.share)}{_since(cost)})"
    text += _mostly(cost.by_probe, cost.cost_us)
    highest = next((rank for rank in cost.ranks if rank.rank == cost.highest), None)
    if highest is not None and highest.share and cost.share and highest.share > _NOTABLE * cost.share:
        text += f"; the most on rank {highest.rank}: {_time(highest.cost_us)} ({share_text(highest.share)})"
    return text


def checks_completely(cost: CostTable) -> bool:
    """Whether the job was too short for the budget: a share of it would say nothing about a longer job."""
    # The first step is not measured.
    most = max((rank.steps for rank in cost.ranks), default=0)
    return cost.budget is not None and most < FIRST_STEPS_OF_BUDGET - 1


def _since(cost: CostTable) -> str:
    """The share under the last schedule: the mean of all steps includes the first ones, which are checked fully."""
    last = cost.schedule[-1]
    if len(cost.schedule) < 2 or last.share is None or cost.share is None:
        return ""
    share = share_text(last.share)
    return "" if share == share_text(cost.share) else f"; {share} since step {last.first_step:,}"


def _mostly(by_probe: Mapping[str, float], total: float) -> str:
    names = [name for name, took in by_probe.items() if took > 0]
    if not names or not total:
        return ""
    named = names[:1] if by_probe[names[0]] >= _MOSTLY * total else names[:2]
    return f", mostly {' and '.join(map(_probe, named))}"


def _interval(schedule: Sequence[SchedulePart], check: str) -> str:
    """`at every 4th step since step 64`; of several intervals, the smallest and the largest; empty for every step."""
    parts = [part for part in schedule if getattr(part, check) > 1]
    if not parts:
        return ""
    intervals = sorted({getattr(part, check) for part in parts})
    smallest, largest = _nth(intervals[0]), _nth(intervals[-1])
    text = f"at every {smallest}" if smallest == largest else f"at every {smallest} to {largest}"
    first, last = parts[0].first_step, parts[-1].last_step
    when = f"since step {first:,}" if last == schedule[-1].last_step else f"from step {first:,} to {last:,}"
    return f"{text} step {when}"


def _every(interval: int) -> str:
    return "every step" if interval == 1 else f"every {_nth(interval)} step"


def _nth(number: int) -> str:
    last_two, last = number % 100, number % 10
    suffix = "th" if 11 <= last_two <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(last, "th")
    return f"{number}{suffix}"


def _others(rank: RankCost, names: Sequence[str]) -> float:
    return sum(took for name, took in rank.by_probe.items() if name not in names)


def _probe(name: str) -> str:
    """The name of a probe comes from a record: it may be anything."""
    return shortened(safe_line(name), _MOST_CHARACTERS)


def _time(microseconds: float) -> str:
    return time_text(round(microseconds * 1000))


def _capitalized(text: str) -> str:
    return text.removeprefix("the ")[:1].upper() + text.removeprefix("the ")[1:]
