"""What the ranks ran in: versions, devices, hosts and variables; where they differ, who has what."""

from __future__ import annotations

from ddpcheck.analysis.history.result import EnvironmentRow
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.html.material import Material
from ddpcheck.reports.rank_ranges import ranks_phrase


def section(made: Material) -> Html | None:
    rows = made.report.environment
    if not rows:
        return None
    where = tag("p", "Run folder: ", tag("code", made.report.run.get("path") or "-"), class_="quiet")
    return joined([table(("", "value"), [[row.name, _values(row)] for row in rows], "Environment"), where])


def _values(row: EnvironmentRow) -> Html:
    if len(row.values) == 1:
        return tag("td", tag("code", row.values[0].value or "-"))
    parts = [
        tag("div", f"{ranks_phrase(one.ranks)}: ", tag("code", one.value or "not set")) for one in row.values
    ]
    return tag("td", *parts)
