"""Series over the steps of a job: step time, gradient norms, AllReduce error and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timeseries.model import GradientHistory, SeriesKind
from ddpcheck.formatting import rank_ranges, size_text, time_text
from ddpcheck.reports.views.memory import memory_curves, memory_rows, similar_ranks
from ddpcheck.reports.views.table import Column, Table, numbers, row

# Of each quantity; report.json has all ranks.
_MOST_SERIES = 4
_FEWEST_POINTS = 3
_MOST_ROWS = 64
_MOST_MARKS = 16

Values = Sequence[float | None]


@dataclass(frozen=True)
class SeriesView:
    """One quantity over the steps."""

    quantity: str
    # Whose it is, e.g. "rank 2".
    owner: str
    values: Values
    formatted: Callable[[float], str]
    # The steps of the values where they are not evenly spaced: a value then holds until the next one.
    steps: Sequence[int] = ()


def job_series(report: Report) -> list[SeriesView]:
    """A few series of each quantity that has enough points."""
    every = (*_step_times(report), *_gradient_norms(report), *_memory(report))
    return [series for series in every if _known_count(series.values) >= _FEWEST_POINTS]


def _known_count(values: Values) -> int:
    return sum(value is not None for value in values)


def _step_times(report: Report) -> list[SeriesView]:
    """Of many ranks those with the longest steps."""
    ranks = [rank for table in report.time for rank in table.ranks if rank.course_us]
    longest = sorted(ranks, key=lambda rank: -max(rank.course_us))[:_MOST_SERIES]
    return [
        SeriesView("step time", f"rank {rank.rank}", rank.course_us, lambda us: time_text(round(us * 1000)))
        for rank in sorted(longest, key=lambda rank: rank.rank)
    ]


def _gradient_norms(report: Report) -> list[SeriesView]:
    several = len(report.gradients) > 1
    return [
        SeriesView(
            "gradient norm",
            f"reduced, module {history.module}" if several else "reduced",
            history.reduced,
            "{:.3g}".format,
        )
        for history in report.gradients[:_MOST_SERIES]
    ]


def _memory(report: Report) -> list[SeriesView]:
    """Ranks with a similar peak share a series: that of the rank with the highest peak."""
    series = []
    curves = memory_curves(report)
    for group in similar_ranks(memory_rows(report))[:_MOST_SERIES]:
        ranks = [each["rank"] for each in group]
        curve = curves.get(max(group, key=lambda each: each["most"])["rank"], [])
        series.append(
            SeriesView(
                "memory",
                f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks)}",
                [value for _, value in curve],
                size_text,
                [step for step, _ in curve],
            )
        )
    return series


@dataclass(frozen=True)
class StepSeries:
    """Values at steps, of the job or of one rank."""

    label: str
    steps: Sequence[int]
    values: Values
    rank: int | None = None


def loss_series(report: Report) -> list[StepSeries]:
    """The mean loss over ranks; empty if no loss could be read, or if the report was made without time series."""
    job = report.course.job if report.course is not None else ()
    return [
        StepSeries(" ".join(filter(None, ("loss", each.of))), list(each.steps), list(each.values))
        for each in job
        if each.figure is SeriesKind.LOSS and len(each.steps) >= _FEWEST_POINTS
    ]


def step_time_series(report: Report) -> list[StepSeries]:
    """Milliseconds by rank; each value is the maximum of an interval of steps, at its first step."""
    series = []
    for table in report.time:
        for rank in table.ranks:
            points = len(rank.course_us)
            if points < _FEWEST_POINTS:
                continue
            span = table.last_step + 1 - table.first_step
            steps = [table.first_step + span * number // points for number in range(points)]
            values = [round(us / 1000, 3) for us in rank.course_us]
            series.append(StepSeries(f"rank {rank.rank}", steps, values, rank.rank))
    return series


@dataclass(frozen=True)
class FindingMark:
    """The step at which findings begin, with their codes."""

    step: int
    label: str
    severity: Severity


def finding_marks(report: Report) -> list[FindingMark]:
    """One for each step with findings, the most severe colour; of very many, the first."""
    by_step: dict[int, list[Finding]] = {}
    for finding in report.findings:
        if finding.step is not None and finding.severity is not Severity.NOTE:
            by_step.setdefault(finding.step, []).append(finding)
    return [
        FindingMark(
            step,
            ", ".join(dict.fromkeys(finding.code for finding in of_step)),
            max((finding.severity for finding in of_step), key=lambda severity: severity.weight),
        )
        for step, of_step in sorted(by_step.items())[:_MOST_MARKS]
    ]


def series_table(series: Mapping[str, Values], title: str, unit: str = "") -> Table:
    """Minimum, median, maximum and last value of each series."""
    suffix = f" ({unit})" if unit else ""
    columns = (
        Column("series"),
        *numbers(f"{name}{suffix}" for name in ("minimum", "median", "maximum", "last")),
    )
    rows = []
    for name, values in list(series.items())[:_MOST_ROWS]:
        known = [value for value in values if value is not None]
        figures = (min(known), median(known), max(known), known[-1]) if known else ()
        rows.append(row([name, *(map("{:.4g}".format, figures) if figures else [None] * 4)]))
    return Table(title, columns, tuple(rows), noun="series", total=len(series))


def norm_summary(history: GradientHistory) -> str:
    """What the norms are and how exact they are."""
    each = f" Each point is the maximum of {history.every} steps." if history.every > 1 else ""
    return (
        f"Norms are estimated from sketches, accurate to 20 %.{each} The reduced norm is smaller than the local "
        "norms where local gradients differ."
    )


def error_summary(history: GradientHistory) -> str:
    """Whether the reduced gradients are the mean; empty where that was not checked."""
    known = [value for value in history.off_mean if value is not None]
    if not known:
        return ""
    beyond = sum(value > 1 for value in known)
    if beyond:
        return f"The error is above the rounding bound at {beyond} of {len(known)} points."
    return f"The error is always below the rounding bound (maximum {max(known):.2g})."
