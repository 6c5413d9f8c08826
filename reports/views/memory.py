"""Memory: what each rank holds, by category, with ranks that hold about the same in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.finding import Severity
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import rank_ranges
from ddpcheck.reports.views.table import Cell, Column, Row, Table, numbers, row
from ddpcheck.rules.rule import Need, is_about

if TYPE_CHECKING:
    from ddpcheck.analysis.memory.table import RankMemoryRow

# A smaller model's memory is mostly that of the interpreter.
_LEAST_BYTES = 10_000_000
_SIMILAR = 0.05
_COLUMNS = (
    Column("rank"),
    Column("device", detail=True),
    *numbers(("peak", "weights", "gradients", "buckets", "optimizer", "buffers", "other", "baseline")),
)
_LEGEND = (
    "Peak: the most that was held after a step or in a backward. Other: activations and temporary memory as the "
    "backward begins. Baseline: what was held before the model was wrapped, without its weights."
)


def memory_rows(report: Report) -> list[RankMemoryRow]:
    return list(report.memory["ranks"]) if report.memory is not None else []


def memory_table(report: Report) -> Table | None:
    """Ranks with a similar peak share a row, which has the figures of the rank with the highest peak."""
    rows = memory_rows(report)
    if not rows or report.memory is None:
        return None
    groups = similar_ranks(rows)
    has_finding = any(
        is_about(finding.code, Need.MEMORY) and finding.severity is not Severity.NOTE
        for finding in report.findings
    )
    total = report.memory.get("of") or len(rows)
    every = None
    if len(groups) < len(rows):
        singles = tuple(_row([each]) for each in rows)
        every = Table(f"All {len(rows)} ranks", _COLUMNS, singles, subtitle="MB", noun="ranks", total=total)
    return Table(
        f"Memory {memory_location(rows)}",
        _COLUMNS,
        tuple(map(_row, groups)),
        subtitle="MB",
        legend=_LEGEND,
        noun="groups of ranks",
        every=every,
        minor=not has_finding and max(each["parameters"] for each in rows) < _LEAST_BYTES,
    )


def memory_curves(report: Report) -> dict[int, list[tuple[int, int]]]:
    """By rank: steps and sizes. A size is recorded when it changes, so the last one holds to the rank's last step."""
    last_steps = {rank.rank: rank.steps - 1 for rank in report.attempts[-1].ranks} if report.attempts else {}
    curves = {}
    for each in memory_rows(report):
        curve = [(step, size) for step, size in each["curve"]]
        last = last_steps.get(each["rank"], -1)
        if curve and curve[-1][0] < last:
            curve.append((last, curve[-1][1]))
        if curve:
            curves[each["rank"]] = curve
    return curves


def memory_location(rows: list[RankMemoryRow]) -> str:
    return "on the device" if rows[0]["measured"] == "allocated" else "of the processes"


def similar_ranks(rows: list[RankMemoryRow]) -> list[list[RankMemoryRow]]:
    """Ranks whose peaks differ by at most 5 %, together."""
    groups: list[list[RankMemoryRow]] = []
    for each in rows:
        group = next((group for group in groups if _similar(group[0], each)), None)
        if group is None:
            groups.append([each])
        else:
            group.append(each)
    return groups


def _similar(one: RankMemoryRow, other: RankMemoryRow) -> bool:
    return abs(one["most"] - other["most"]) <= _SIMILAR * max(one["most"], other["most"])


def _row(group: list[RankMemoryRow]) -> Row:
    highest = max(group, key=lambda each: each["most"])
    devices = {each["device"] for each in group}
    ranks = [each["rank"] for each in group]
    gradients = "in buckets" if highest["gradients_in_buckets"] else _megabytes(highest["gradients"])
    return row(
        [
            Cell(rank_ranges(ranks)),
            devices.pop() if len(devices) == 1 else f"{len(devices)} devices",
            _megabytes(highest["most"]),
            _megabytes(highest["parameters"]),
            gradients,
            _megabytes(highest["buckets"]),
            _megabytes(highest["optimizer_state"]),
            _megabytes(highest["buffers"]),
            _megabytes(highest["rest"]),
            _megabytes(highest["before"]),
        ],
        weight=highest["most"],
        ranks=ranks,
    )


def _megabytes(size: int) -> str:
    """One unit for the whole table, so that its figures can be compared and added."""
    return f"{size / 1e6:,.0f}" if size >= 1e7 or not size else f"{size / 1e6:.1f}"
