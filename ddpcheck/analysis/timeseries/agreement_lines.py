"""Agreement over the steps: of the whole job, and of each rank with the majority."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.timeseries.agreement import AgreementSeries
from ddpcheck.analysis.timeseries.history import MOST_MODULES
from ddpcheck.analysis.timeseries.model import NamedSeries, SeriesKind
from ddpcheck.analysis.timeseries.series import line, there


def modules_shown(attempt: Attempt) -> list[ModuleKey]:
    return attempt.modules()[:MOST_MODULES]


def module_label(attempt: Attempt, module: ModuleKey) -> str:
    """Nothing where there is but one."""
    modules = attempt.modules()
    return f"module {modules.index(module)}" if len(modules) > 1 else ""


def job_agreement(attempt: Attempt, room: int) -> tuple[NamedSeries, ...]:
    """1 or 0, and how many parameters differ."""
    found: list[NamedSeries | None] = []
    for module in _modules(attempt):
        book = attempt.agreement.series[module].differing
        steps = [number * book.every for number in sorted(book.points)]
        counts = [float(book.points[number]) for number in sorted(book.points)]
        of = module_label(attempt, module)
        found.append(line(SeriesKind.AGREEMENT, steps, [float(not count) for count in counts], room, of))
        found.append(line(SeriesKind.DIFFERING, steps, counts, room, of))
    return there(found)


def rank_agreement(attempt: Attempt, rank: int, room: int) -> tuple[NamedSeries, ...]:
    """1 where this rank holds what the majority does."""
    found: list[NamedSeries | None] = []
    for module in _modules(attempt):
        if rank not in module[0]:
            continue
        book = attempt.agreement.series[module]
        every = book.differing.every
        odd, absent = _stretches_of(book, rank, every)
        numbers = [
            number for number in sorted(book.differing.points) if number in odd or number not in absent
        ]
        values = [float(number not in odd) for number in numbers]
        steps = [number * every for number in numbers]
        found.append(line(SeriesKind.AGREEMENT, steps, values, room, module_label(attempt, module)))
    return there(found)


def _modules(attempt: Attempt) -> list[ModuleKey]:
    """Those whose replicas are to agree at every step."""
    books = attempt.agreement.series
    return [each for each in modules_shown(attempt) if each in books and not attempt.uses_local_sgd(each)]


def _stretches_of(book: AgreementSeries, rank: int, every: int) -> tuple[set[int], set[int]]:
    """Points at which the rank was odd, and at which it said nothing."""
    odd: set[int] = set()
    absent: set[int] = set()
    for stretch in book.stretches:
        points = range(max(0, stretch.first) // every, stretch.last // every + 1)
        if rank in stretch.odd:
            odd.update(points)
        elif rank in stretch.absent:
            absent.update(points)
    return odd, absent
