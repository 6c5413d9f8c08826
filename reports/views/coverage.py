"""Coverage and environment: what was checked, and what the ranks ran in."""

from __future__ import annotations

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timeseries.model import EnvironmentRow
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.views.table import Cell, CellMark, Column, Table, row

_MARKS = {"agree": CellMark.OK, "differ": CellMark.ERROR}


def check_table(report: Report) -> Table | None:
    """What was compared, with or without a finding."""
    if not report.checks:
        return None
    columns = (Column("check"), Column("outcome"), Column("detail"))
    rows = tuple(
        row([check.name, Cell("", _MARKS.get(check.outcome, CellMark.WARNING), check.outcome), check.detail])
        for check in report.checks
    )
    return Table("Checked", columns, rows, noun="checks")


def environment_tables(report: Report) -> tuple[Table | None, Table | None]:
    """Versions, hosts and whatever differs between ranks; then the variables that are equal on all ranks."""
    first = [each for each in report.environment if not each.name.isupper() or len(each.values) > 1]
    rest = [each for each in report.environment if each not in first]
    return (
        _environment("Environment", first) if first else None,
        _environment(f"{len(rest)} variables with one value on all ranks", rest) if rest else None,
    )


def _environment(title: str, rows: list[EnvironmentRow]) -> Table:
    columns = (Column("name"), Column("value", code=True))
    return Table(title, columns, tuple(row([each.name, _value(each)]) for each in rows), noun="variables")


def _value(each: EnvironmentRow) -> Cell:
    if len(each.values) == 1:
        return Cell(each.values[0].value or "-")
    lines = [f"{name_ranks(value.ranks)}: {value.value or 'not set'}" for value in each.values]
    return Cell("\n".join(lines), CellMark.WARNING)
