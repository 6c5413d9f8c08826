"""Ranks: which agreed over the steps, how each ended (alike ones in one row), their hosts, coverage and environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpcheck.analysis.report import AttemptSummary, Check, RankStatus, RankSummary, Report
from ddpcheck.analysis.timeseries.model import AgreementHistory, AgreementInterval, EnvironmentRow
from ddpcheck.analysis.timing.collector import HostClock
from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.verdict import counted
from ddpcheck.reports.views.table import Cell, CellMark, Column, Row, Table, row

_AGREEMENT_COLUMNS = (
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
    return Table("Agreement by interval of steps", _AGREEMENT_COLUMNS, rows, noun="intervals")


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


# Groups of ranks that are shown; more groups than that are joined by what they have in common.
MOST_GROUPS = 16
_MOST_RANKS = 2048

_GroupKey = Callable[[RankSummary], tuple[object, ...]]

# From the finest grouping to the coarsest; the first that gives few enough groups is used.
_GROUPINGS: tuple[_GroupKey, ...] = (
    lambda rank: (rank.status, rank.steps, last_position(rank), rank.detail, rank.host, rank.device),
    lambda rank: (rank.status, rank.steps, last_position(rank), rank.detail, rank.host),
    lambda rank: (rank.status, rank.steps, last_position(rank), rank.detail),
    lambda rank: (rank.status, rank.steps),
    lambda rank: (rank.status,),
)
_MARKS = {
    RankStatus.FINISHED: CellMark.OK,
    RankStatus.RAISED: CellMark.ERROR,
    RankStatus.DIED: CellMark.ERROR,
    RankStatus.STOPPED: CellMark.WARNING,
    RankStatus.RUNNING: CellMark.WARNING,
    RankStatus.MISSING: CellMark.ERROR,
}
_COLUMNS = (
    Column("rank"),
    Column("host"),
    Column("device"),
    Column("steps", number=True),
    Column("status"),
)


def rank_tables(report: Report) -> list[Table]:
    """One table for each attempt."""
    attempts = [attempt for attempt in report.attempts if attempt.ranks]
    return [_attempt_table(attempt, len(report.attempts) > 1) for attempt in attempts]


def _attempt_table(attempt: AttemptSummary, several: bool) -> Table:
    size = f"{counted(attempt.world_size, 'rank')}, {counted(attempt.steps, 'step')}"
    title = f"Ranks, attempt {attempt.number}: {size}" if several else "Ranks"
    groups = rank_groups(attempt.ranks)
    every = None
    if len(groups) < len(attempt.ranks):
        singles = tuple(_group_row([rank]) for rank in attempt.ranks[:_MOST_RANKS])
        every = Table(f"All {len(attempt.ranks)} ranks", _COLUMNS, singles, noun="ranks")
    return Table(title, _COLUMNS, tuple(map(_group_row, groups)), noun="groups of ranks", every=every)


def rank_groups(ranks: Sequence[RankSummary]) -> list[list[RankSummary]]:
    """Ranks that ended alike, ordered by their lowest rank."""
    groups: list[list[RankSummary]] = []
    for key in _GROUPINGS:
        groups = _grouped(ranks, key)
        if len(groups) <= MOST_GROUPS:
            break
    return groups


def last_position(rank: RankSummary) -> str:
    """The last step and stage that a rank recorded; empty for a rank that finished."""
    if rank.status is RankStatus.FINISHED or rank.last_step is None:
        return ""
    return f"at step {rank.last_step}" + (f", {rank.last_stage}" if rank.last_stage else "")


def _grouped(ranks: Sequence[RankSummary], key: _GroupKey) -> list[list[RankSummary]]:
    groups: dict[tuple[object, ...], list[RankSummary]] = {}
    for rank in sorted(ranks, key=lambda item: item.rank):
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def _group_row(group: list[RankSummary]) -> Row:
    status = group[0].status
    details = {_detail(rank) for rank in group}
    detail = details.pop() if len(details) == 1 else ""
    steps = [rank.steps for rank in group]
    ranks = [rank.rank for rank in group]
    return row(
        [
            rank_ranges(ranks),
            _common([rank.host for rank in group], "hosts"),
            _common([rank.device for rank in group], "devices"),
            str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}",
            Cell(detail, _MARKS[status], badge=status.value),
        ],
        ranks=ranks,
    )


def _detail(rank: RankSummary) -> str:
    return ": ".join(filter(None, (last_position(rank), rank.detail)))


def _common(values: list[str], noun: str) -> str:
    distinct = set(values)
    return (values[0] or "-") if len(distinct) == 1 else f"{len(distinct)} {noun}"


def host_table(report: Report) -> Table | None:
    """The offsets of the hosts' clocks; None for a job on one host."""
    if not report.hosts:
        return None
    rows = tuple(row([host.host, rank_ranges(host.ranks), _clock_offset(host)]) for host in report.hosts)
    columns = (Column("host"), Column("ranks"), Column("clock offset"))
    return Table("Hosts", columns, rows, noun="hosts")


def _clock_offset(host: HostClock) -> str:
    if not host.here:
        return "records are missing: see ddpcheck merge"
    if host.reference:
        return "reference"
    if host.offset is None or host.uncertainty is None:
        return "unknown: too few common steps"
    direction = "ahead" if host.offset >= 0 else "behind"
    uncertainty = _duration(max(host.uncertainty, 1e-6))
    return f"{_duration(abs(host.offset))} {direction} (+/- {uncertainty})"


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


_CHECK_MARKS = {"agree": CellMark.OK, "differ": CellMark.ERROR}


def check_table(report: Report) -> Table | None:
    """What was compared, with or without a finding."""
    if not report.checks:
        return None
    columns = (Column("check"), Column("outcome"), Column("detail"))
    rows = tuple(
        row(
            [
                check.name,
                Cell("", _CHECK_MARKS.get(check.outcome, CellMark.WARNING), check.outcome),
                _check_detail(check),
            ]
        )
        for check in report.checks
    )
    return Table("Checked", columns, rows, noun="checks")


def _check_detail(check: Check) -> str:
    if not check.compared or not check.steps_left_out:
        return check.detail
    steps = f"{check.steps_left_out:,} {'step' if check.steps_left_out == 1 else 'steps'} left out (--budget)"
    return ", ".join(filter(None, (check.detail, steps)))


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
