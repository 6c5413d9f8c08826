"""What was looked at, whether or not it raised a finding: what the verdict rests on."""

from __future__ import annotations

from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, table, tag


def section(made: PageContext) -> Html | None:
    if not made.report.checks:
        return None
    rows = [
        [
            check.name,
            tag("td", tag("span", check.outcome, class_=f"badge {check.outcome.replace(' ', '-')}")),
            check.detail,
        ]
        for check in made.report.checks
    ]
    return table(("what", "outcome", ""), rows, "What was checked")
