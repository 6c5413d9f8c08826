"""The ranks: how each ended; those that fared alike share a row, which opens into them."""

from __future__ import annotations

from ddpcheck.analysis.report import AttemptSummary, RankSummary
from ddpcheck.formatting import rank_ranges
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.terminal.ranks import rank_groups, standing
from ddpcheck.reports.verdict import counted

_MOST_SINGLE = 2048


def section(made: PageContext) -> Html | None:
    attempts = [attempt for attempt in made.report.attempts if attempt.ranks]
    return joined(_attempt(attempt, len(attempts)) for attempt in attempts) if attempts else None


def _attempt(attempt: AttemptSummary, of: int) -> Html:
    size = f"{counted(attempt.world_size, 'rank')}, {counted(attempt.steps, 'step')}"
    heading = tag("h3", f"Attempt {attempt.number}: {size}") if of > 1 else None
    groups = rank_groups(attempt.ranks)
    overview = table(
        ("ranks", "hosts", "devices", "steps", "status"), [_group(group) for group in groups], "Ranks"
    )
    if len(groups) == len(attempt.ranks):
        return joined([heading, overview])
    single = table(
        ("rank", "host", "device", "steps", "status"),
        [_group([rank]) for rank in attempt.ranks[:_MOST_SINGLE]],
        "Every rank",
    )
    every = tag("details", tag("summary", f"All {len(attempt.ranks)} ranks"), single)
    return joined([heading, overview, every])


def _group(group: list[RankSummary]) -> list[object]:
    first = group[0]
    details = {_described(rank) for rank in group}
    badge = tag("span", first.status.value, class_=f"badge {first.status.value}")
    return [
        rank_ranges(rank.rank for rank in group),
        _alike([rank.host for rank in group], "hosts"),
        _alike([rank.device for rank in group], "devices"),
        _span([rank.steps for rank in group]),
        tag("td", badge, details.pop() if len(details) == 1 else ""),
    ]


def _described(rank: RankSummary) -> str:
    return " ".join(part for part in (standing(rank), rank.detail) if part)


def _alike(values: list[str], noun: str) -> str:
    distinct = set(values)
    return (values[0] or "-") if len(distinct) == 1 else f"{len(distinct)} {noun}"


def _span(steps: list[int]) -> str:
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"
