"""Agreement over the steps: intervals in which the same ranks hold the same parameters."""

from __future__ import annotations

from ddpcheck.analysis.timeseries.model import AgreementHistory, AgreementInterval
from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.views.table import Cell, CellMark, Column, Table, row

_COLUMNS = (
    Column("steps"),
    Column("compared", number=True),
    Column("ranks that differ"),
    Column("no record of"),
)


def agreement_summary(history: AgreementHistory) -> str:
    """Whether all ranks agreed; if not, which differ first."""
    diverged = [interval for interval in history.stretches if interval.odd]
    if not diverged:
        compared = sum(interval.compared for interval in history.stretches)
        return f"All {len(history.ranks)} ranks agree in all {compared} comparisons."
    first = diverged[0]
    ranks = name_ranks(first.odd).capitalize()
    verb = "differs" if len(first.odd) == 1 else "differ"
    outliers = f"{ranks} {verb}" if first.majority else f"{ranks} {verb} without a majority"
    return f"{outliers} from {_step(first.first)} on."


def agreement_table(history: AgreementHistory) -> Table:
    rows = tuple(
        row([_steps(interval), interval.compared, _outliers(interval), rank_ranges(interval.absent) or None])
        for interval in history.stretches
    )
    return Table("Agreement by interval of steps", _COLUMNS, rows, noun="intervals")


def _outliers(interval: AgreementInterval) -> Cell:
    if not interval.odd:
        return Cell("none")
    majority = "" if interval.majority else " (no majority)"
    return Cell(f"{rank_ranges(interval.odd)}{majority}", CellMark.ERROR)


def _steps(interval: AgreementInterval) -> str:
    first = _step(interval.first)
    return first if interval.first == interval.last else f"{first} to {interval.last}"


def _step(step: int) -> str:
    return "wrapping" if step < 0 else f"step {step}"
