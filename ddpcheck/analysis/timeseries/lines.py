"""Series over the steps: agreement, gradients, loss, memory, overlap and step times, of the job and of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.timeseries.collector import (
    OFF_MEAN,
    REDUCED,
    AgreementSeries,
    GradientSeries,
    LossSeries,
)
from ddpcheck.analysis.timeseries.model import AgreementHistory, GradientHistory, NamedSeries, SeriesKind
from ddpcheck.analysis.timeseries.series import MAX_REPORT_POINTS, Series, named_series, present
from ddpcheck.analysis.timing.collector import StepTimeSeries
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.modules import OptimizerRecord

MOST_MODULES = 8


def agreement_history(attempt: Attempt) -> tuple[AgreementHistory, ...]:
    """Modules whose replicas must agree at every step, in the order of wrapping."""
    by_module = attempt.agreement.series
    modules = [
        module for module in attempt.modules() if module in by_module and not attempt.uses_local_sgd(module)
    ]
    return tuple(
        AgreementHistory(
            module=attempt.number(module),
            name=_name(attempt, module),
            ranks=module[0],
            stretches=tuple(sorted(by_module[module].intervals, key=lambda interval: interval.first)),
            cut=by_module[module].cut,
            wrapped_at=_first(rank.as_wrapped[module].where for rank in attempt.of_module(module).values()),
            stepped_at=_first(record.where for record in _optimizers(attempt, module)),
        )
        for module in modules[:MOST_MODULES]
    )


def gradient_history(attempt: Attempt) -> tuple[GradientHistory, ...]:
    """Modules whose gradients were sketched."""
    by_module = attempt.gradients.series
    modules = [module for module in attempt.modules() if module in by_module and by_module[module].points]
    return tuple(_gradients(attempt, module, by_module[module]) for module in modules[:MOST_MODULES])


def _gradients(attempt: Attempt, module: ModuleKey, gradients: GradientSeries) -> GradientHistory:
    numbers = sorted(gradients.points)
    points = [gradients.points[number] for number in numbers]
    # Norms are known to two digits at most.
    series = {
        key: tuple(None if key not in point else float(f"{point[key]:.3g}") for point in points)
        for key in (*module[0], REDUCED, OFF_MEAN)
    }
    return GradientHistory(
        module=attempt.number(module),
        name=_name(attempt, module),
        every=gradients.every,
        steps=tuple(number * gradients.every for number in numbers),
        local={str(rank): series[rank] for rank in module[0]},
        reduced=series[REDUCED],
        off_mean=series[OFF_MEAN],
    )


def _optimizers(attempt: Attempt, module: ModuleKey) -> Iterator[OptimizerRecord]:
    for rank in attempt.of_module(module).values():
        for (_, of), record in sorted(rank.optimizers.items(), key=lambda item: item[0][0]):
            if of == module:
                yield record


def _first(locations: Iterable[str]) -> str:
    return next(filter(None, locations), "")


def _name(attempt: Attempt, module: ModuleKey) -> str:
    return next(rank.latest[module].name for rank in attempt.of_module(module).values())


_COLUMNS = {
    "total": SeriesKind.STEP,
    "data": SeriesKind.DATA,
    "forward": SeriesKind.FORWARD,
    "backward": SeriesKind.BACKWARD,
    "optimizer": SeriesKind.OPTIMIZER,
    "other": SeriesKind.OTHER,
    "wait": SeriesKind.WAIT,
    "watching": SeriesKind.WATCHING,
}
Shortest = Mapping[tuple[int, ...], Mapping[int, int]]


def modules_shown(attempt: Attempt) -> list[ModuleKey]:
    return attempt.modules()[:MOST_MODULES]


def module_label(attempt: Attempt, module: ModuleKey) -> str:
    """Empty if there is only one module."""
    modules = attempt.modules()
    return f"module {modules.index(module)}" if len(modules) > 1 else ""


def job_agreement(attempt: Attempt, max_points: int) -> tuple[NamedSeries, ...]:
    """Agreement (1 or 0), and the number of differing parameters."""
    result: list[NamedSeries | None] = []
    for module in _agreeing_modules(attempt):
        series = attempt.agreement.series[module].differing
        steps = [number * series.every for number in sorted(series.points)]
        counts = [float(series.points[number]) for number in sorted(series.points)]
        of = module_label(attempt, module)
        result.append(
            named_series(SeriesKind.AGREEMENT, steps, [float(not count) for count in counts], max_points, of)
        )
        result.append(named_series(SeriesKind.DIFFERING, steps, counts, max_points, of))
    return present(result)


def rank_agreement(attempt: Attempt, rank: int, max_points: int) -> tuple[NamedSeries, ...]:
    """1 if this rank agrees with the majority."""
    result: list[NamedSeries | None] = []
    for module in _agreeing_modules(attempt):
        if rank not in module[0]:
            continue
        series = attempt.agreement.series[module]
        every = series.differing.every
        outlier, absent = _stretches_of(series, rank, every)
        numbers = [
            number for number in sorted(series.differing.points) if number in outlier or number not in absent
        ]
        values = [float(number not in outlier) for number in numbers]
        steps = [number * every for number in numbers]
        result.append(
            named_series(SeriesKind.AGREEMENT, steps, values, max_points, module_label(attempt, module))
        )
    return present(result)


def _agreeing_modules(attempt: Attempt) -> list[ModuleKey]:
    """Modules whose replicas must agree at every step."""
    by_module = attempt.agreement.series
    return [each for each in modules_shown(attempt) if each in by_module and not attempt.uses_local_sgd(each)]


def _stretches_of(series: AgreementSeries, rank: int, every: int) -> tuple[set[int], set[int]]:
    """Points at which the rank was an outlier, and at which it did not report."""
    outlier: set[int] = set()
    absent: set[int] = set()
    for interval in series.intervals:
        points = range(max(0, interval.first) // every, interval.last // every + 1)
        if rank in interval.odd:
            outlier.update(points)
        elif rank in interval.absent:
            absent.update(points)
    return outlier, absent


def job_gradients(histories: Sequence[GradientHistory], max_points: int) -> tuple[NamedSeries, ...]:
    """Norm of the reduced gradients and AllReduce error."""
    return present(
        named_series(kind, history.steps, values, max_points, _history_label(history, histories))
        for history in histories
        for kind, values in (
            (SeriesKind.NORM_AFTER, history.reduced),
            (SeriesKind.OFF_MEAN, history.off_mean),
        )
    )


def rank_gradients(
    histories: Sequence[GradientHistory], rank: int, max_points: int
) -> tuple[NamedSeries, ...]:
    return present(
        named_series(
            SeriesKind.NORM_BEFORE,
            history.steps,
            history.local[str(rank)],
            max_points,
            _history_label(history, histories),
        )
        for history in histories
        if str(rank) in history.local
    )


def _history_label(history: GradientHistory, histories: Sequence[GradientHistory]) -> str:
    return f"module {history.module}" if len(histories) > 1 else ""


def rank_loss(attempt: Attempt, rank: int, max_points: int) -> tuple[NamedSeries, ...]:
    mine = {optimizer: series for (of, optimizer), series in attempt.losses.items() if of == rank}
    return present(
        named_series(
            SeriesKind.LOSS, series.steps, series.values, max_points, _optimizer_label(attempt, optimizer)
        )
        for optimizer, series in sorted(mine.items())
    )


def job_loss(attempt: Attempt, max_points: int) -> tuple[NamedSeries, ...]:
    """Mean over ranks, at steps that every rank recorded."""
    result: list[NamedSeries | None] = []
    for optimizer in sorted({optimizer for _, optimizer in attempt.losses}):
        losses = [series for (_, of), series in attempt.losses.items() if of == optimizer]
        if len(losses) == len(attempt.ranks):
            means = _means(losses)
            result.append(
                named_series(
                    SeriesKind.LOSS,
                    list(means),
                    list(means.values()),
                    max_points,
                    _optimizer_label(attempt, optimizer),
                )
            )
    return present(result)


def _means(losses: list[LossSeries]) -> dict[int, float]:
    by_rank = [dict(zip(series.steps, series.values, strict=True)) for series in losses]
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    return {step: fmean(values[step] for values in by_rank) for step in common}


def _optimizer_label(attempt: Attempt, optimizer: int) -> str:
    """Empty if only one optimizer has a loss."""
    return f"optimizer {optimizer}" if len({of for _, of in attempt.losses}) > 1 else ""


def rank_memory(attempt: Attempt, rank: int, max_points: int) -> tuple[NamedSeries, ...]:
    """Memory after each step and peak memory. Recorded when it changes by 1 MiB; holds until the next value."""
    memory = attempt.memory.ranks.get(rank)
    if memory is None:
        return ()
    last = attempt.steps(rank) - 1
    return present(
        _memory_series(kind, series, last, max_points)
        for kind, series in ((SeriesKind.MEMORY, memory.after), (SeriesKind.MEMORY_HIGH, memory.high))
    )


def _memory_series(kind: SeriesKind, series: Series, last: int, max_points: int) -> NamedSeries | None:
    steps, values = list(series.steps), list(series.values)
    if steps and steps[-1] < last:
        steps.append(last)
        values.append(values[-1])
    return named_series(kind, steps, values, max_points)


def job_overlap(overlap: Overlap | None) -> tuple[NamedSeries, ...]:
    """Means over ranks."""
    if overlap is None:
        return ()
    steps = [each.step for each in overlap.steps]
    return present(
        named_series(kind, steps, [nanoseconds / 1000 for nanoseconds in values], MAX_REPORT_POINTS)
        for kind, values in (
            (SeriesKind.PROFILED_TRANSFER, [each.exposed_transfer_ns for each in overlap.steps]),
            (SeriesKind.PROFILED_WAIT, [each.exposed_wait_ns for each in overlap.steps]),
        )
    )


def rank_overlap(overlap: Overlap | None, rank: int) -> tuple[NamedSeries, ...]:
    mine = next((each for each in overlap.ranks if each.rank == rank), None) if overlap else None
    if mine is None:
        return ()
    steps = [each.step for each in mine.by_step]
    exposed = [each.exposed_ns / 1000 for each in mine.by_step]
    # Without communication there is no overlap.
    hidden = [each.overlap_pct if each.comm_ns else None for each in mine.by_step]
    return present(
        [
            named_series(SeriesKind.OVERLAP, steps, hidden, MAX_REPORT_POINTS),
            named_series(SeriesKind.PROFILED_EXPOSED, steps, exposed, MAX_REPORT_POINTS),
        ]
    )


def shortest_waits(attempt: Attempt) -> Shortest:
    """By group of ranks that synchronize, and step: the wait of the rank that arrived last."""
    groups = dict.fromkeys(module[0] for module in attempt.modules())
    return {
        group: _shortest([attempt.step_times[rank] for rank in group])
        for group in groups
        if len(group) > 1 and all(rank in attempt.step_times for rank in group)
    }


def job_time(shortest: Shortest, max_points: int) -> tuple[NamedSeries, ...]:
    return present(
        named_series(
            SeriesKind.EXPOSED, list(waits), list(waits.values()), max_points, _group_label(group, shortest)
        )
        for group, waits in shortest.items()
    )


def rank_time(
    clock: StepTimeSeries, rank: int, shortest: Shortest, max_points: int
) -> tuple[NamedSeries, ...]:
    parts = [
        named_series(kind, clock.steps, clock.columns[name], max_points) for name, kind in _COLUMNS.items()
    ]
    for group, waits in shortest.items():
        if rank in group:
            mine = [
                (step, wait - waits[step])
                for step, wait in zip(clock.steps, clock.columns["wait"], strict=True)
                if step in waits
            ]
            steps, values = [step for step, _ in mine], [value for _, value in mine]
            parts.append(
                named_series(SeriesKind.FOR_OTHERS, steps, values, max_points, _group_label(group, shortest))
            )
    return present(parts)


def _shortest(clocks: Sequence[StepTimeSeries]) -> dict[int, int]:
    by_rank = [dict(zip(clock.steps, clock.columns["wait"], strict=True)) for clock in clocks]
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    return {step: min(waits[step] for waits in by_rank) for step in common}


def _group_label(group: tuple[int, ...], shortest: Shortest) -> str:
    return name_ranks(group) if len(shortest) > 1 else ""
