"""What the ranks ran in: versions, devices, hosts and variables; where they differ, who has what."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.timeseries.model import EnvironmentRow
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag


def section(made: PageContext) -> Html | None:
    rows = made.report.environment
    if not rows:
        return None
    # What stands out comes first: versions and places, and whatever ranks do not have in common.
    first = [row for row in rows if not row.name.isupper() or len(row.values) > 1]
    rest = [row for row in rows if row not in first]
    where = tag("p", "Run folder: ", tag("code", made.report.run.get("path") or "-"), class_="quiet")
    others = tag("details", tag("summary", f"{len(rest)} variables, the same on all ranks"), _table(rest))
    return joined([_table(first), others if rest else None, where])


def _table(rows: Sequence[EnvironmentRow]) -> Html:
    return table(("", "value"), [[row.name, _values(row)] for row in rows], "Environment")


def _values(row: EnvironmentRow) -> Html:
    if len(row.values) == 1:
        return tag("td", tag("code", row.values[0].value or "-"))
    parts = [
        tag("div", f"{name_ranks(one.ranks)}: ", tag("code", one.value or "not set")) for one in row.values
    ]
    return tag("td", *parts)
