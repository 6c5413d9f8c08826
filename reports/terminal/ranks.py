"""The table of ranks, which stays a table with a thousand of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from ddpcheck.analysis.report import AttemptSummary, RankStatus, RankSummary, Report
from ddpcheck.analysis.timing.clock_offsets import HostClock
from ddpcheck.formatting import rank_ranges
from ddpcheck.reports.terminal.console import LABEL, ReportConsole, indented

_TERMINAL_HOSTS_MOST_ROWS = 8


def put_hosts(ink: ReportConsole, report: Report) -> None:
    """Nothing for a job on one host."""
    if not report.hosts:
        return
    ink.gap()
    rows = [
        [host.host, rank_ranges(host.ranks), _clock(host)]
        for host in report.hosts[:_TERMINAL_HOSTS_MOST_ROWS]
    ]
    ink.put(ink.text("Hosts", LABEL), indented(ink.columns(["host", "ranks", "clock"], rows)))
    more = len(report.hosts) - _TERMINAL_HOSTS_MOST_ROWS
    if more > 0:
        ink.put(ink.text(f"{more} more are in report.json"), indent=2)


def _clock(host: HostClock) -> str:
    if not host.here:
        return "its records are elsewhere: see ddpcheck merge"
    if host.reference:
        return "the others are compared with it"
    if host.offset is None or host.uncertainty is None:
        return "not known: too few common steps"
    way = "ahead" if host.offset >= 0 else "behind"
    return f"{_time(abs(host.offset))} {way}, give or take {_time(max(host.uncertainty, 1e-6))}"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


_MOST_ROWS = 16

_Key = Callable[[RankSummary], tuple[object, ...]]

# From the finest division to the coarsest; the first that fits is shown.
_DIVISIONS: tuple[_Key, ...] = (
    lambda rank: (rank.status, rank.steps, standing(rank), rank.detail, rank.host, rank.device),
    lambda rank: (rank.status, rank.steps, standing(rank), rank.detail, rank.host),
    lambda rank: (rank.status, rank.steps, standing(rank), rank.detail),
    lambda rank: (rank.status, rank.steps),
    lambda rank: (rank.status,),
)

_STYLES = {
    RankStatus.FINISHED: "green",
    RankStatus.RAISED: "red",
    RankStatus.DIED: "bold red",
    RankStatus.STOPPED: "yellow",
    RankStatus.RUNNING: "yellow",
    RankStatus.MISSING: "bold red",
}


def rank_table(ink: ReportConsole, attempt: AttemptSummary) -> Table:
    """One row per group of ranks that fared alike."""
    rows = [_row(ink, group) for group in rank_groups(attempt.ranks)]
    return ink.columns(["rank", "host", "device", "steps", "status"], rows)


def rank_groups(ranks: Sequence[RankSummary]) -> list[list[RankSummary]]:
    """Ranks that fared alike, by their lowest rank."""
    groups: list[list[RankSummary]] = []
    for division in _DIVISIONS:
        groups = _divided(ranks, division)
        if len(groups) <= _MOST_ROWS:
            break
    return groups


def _divided(ranks: Sequence[RankSummary], division: _Key) -> list[list[RankSummary]]:
    groups: dict[tuple[object, ...], list[RankSummary]] = {}
    for rank in sorted(ranks, key=lambda item: item.rank):
        groups.setdefault(division(rank), []).append(rank)
    return list(groups.values())


def _row(ink: ReportConsole, group: list[RankSummary]) -> list[object]:
    status = group[0].status
    details = {_described(rank) for rank in group}
    described = details.pop() if len(details) == 1 else ""
    return [
        rank_ranges(rank.rank for rank in group),
        _alike([rank.host for rank in group], "hosts"),
        _alike([rank.device for rank in group], "devices"),
        _span([rank.steps for rank in group]),
        ink.text(status.value + described, _STYLES[status]),
    ]


def _described(rank: RankSummary) -> str:
    at = standing(rank)
    return (f" {at}" if at else "") + (f": {rank.detail}" if rank.detail else "")


def standing(rank: RankSummary) -> str:
    """Where a rank was last seen; a rank that finished stands nowhere."""
    if rank.status is RankStatus.FINISHED or rank.last_step is None:
        return ""
    return f"at step {rank.last_step}" + (f", {rank.last_stage}" if rank.last_stage else "")


def _alike(values: list[str], noun: str) -> str:
    distinct = set(values)
    return (values[0] or "-") if len(distinct) == 1 else f"{len(distinct)} {noun}"


def _span(steps: list[int]) -> str:
    low, high = min(steps), max(steps)
    return str(low) if low == high else f"{low}-{high}"
