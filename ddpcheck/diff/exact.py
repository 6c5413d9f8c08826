"""Bitwise comparison of two runs, rank by rank: finds the first event in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ddpcheck.diff.model import FOLLOWING_STEPS, ORDER, DiffSource, FirstDifference, Value
from ddpcheck.diff.record_diff import ComparedRank, DiffEvent, Key, RecordDiff, Timeline, compare, written
from ddpcheck.diff.run_input import RunInput
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.modules import SkipRecord

# Steps by which one run may be read ahead of the other before an event counts as missing there.
MOST_AHEAD = 64
_MOST_VALUES = 64


@dataclass(frozen=True)
class RankDifference:
    """One rank's part in a divergence."""

    position: int
    event: DiffEvent
    outcome: RecordDiff
    rank: int
    message: str = ""


@dataclass
class ExactResult:
    """All divergences in order, and how often each stage was compared."""

    divergences: list[FirstDifference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    # The last step that both runs reached, on the most advanced rank.
    common: int = -1


def compare_exactly(a: RunInput, b: RunInput) -> ExactResult:
    """Compare rank by rank; reading stops soon after the earliest difference of all ranks."""
    result = ExactResult()
    differences: list[RankDifference] = []
    agreed: dict[tuple[int, DiffSource], int] = {}
    same_version = a.recorded_by == b.recorded_by
    for rank in sorted(a.headers.keys() & b.headers.keys()):
        comparison = RankComparison(a, b, ComparedRank(rank, same_version))
        earliest = min((difference.event.step for difference in differences), default=None)
        differences += comparison.differences(earliest)
        result.compared.update(comparison.compared)
        result.common = max(result.common, comparison.common)
        for key, step in comparison.agreed.items():
            agreed[key] = min(agreed.get(key, step), step)
    result.divergences = _divergences(differences, agreed)
    return result


class RankComparison:
    """Comparison of one rank in both runs."""

    def __init__(self, a: RunInput, b: RunInput, location: ComparedRank) -> None:
        self._timelines = (Timeline(a.records(location.rank)), Timeline(b.records(location.rank)))
        self.waiting: tuple[dict[Key, DiffEvent], dict[Key, DiffEvent]] = ({}, {})
        self._location = location
        self.compared: Counter[str] = Counter()
        # By module and stage, the last step before the first difference at which the runs agreed.
        self.agreed: dict[tuple[int, DiffSource], int] = {}
        self.common = -1
        self._cleaned_at = 0
        self._differences: list[RankDifference] = []

    def differences(self, earliest: int | None) -> list[RankDifference]:
        last = None if earliest is None else earliest + FOLLOWING_STEPS
        for run, event in self._events():
            other = self.waiting[1 - run].pop(event.key, None)
            if other is None:
                self.waiting[run][event.key] = event
            else:
                self._compare(*((event, other) if run == 0 else (other, event)))
            if self._differences and last is None:
                last = min(difference.event.step for difference in self._differences) + FOLLOWING_STEPS
            if last is not None and min(timeline.step for timeline in self._timelines) > last:
                break
            self._drop_old()
        self._report_missing(list(self.waiting[0].values()), 0)
        self._report_missing(list(self.waiting[1].values()), 1)
        self.common = min(timeline.step for timeline in self._timelines)
        return [
            difference for difference in self._differences if last is None or difference.event.step <= last
        ]

    def _events(self) -> Iterator[tuple[int, DiffEvent]]:
        """Events of whichever run is behind, so that few events are buffered."""
        while not all(timeline.over for timeline in self._timelines):
            behind = min(
                (n for n in (0, 1) if not self._timelines[n].over), key=lambda n: self._timelines[n].step
            )
            event = next(self._timelines[behind], None)
            if event is not None:
                yield behind, event

    def _drop_old(self) -> None:
        """Drop old buffered events. Not at every event, because that would be slower than reading."""
        step = min(timeline.step for timeline in self._timelines)
        if step < self._cleaned_at + MOST_AHEAD:
            return
        self._cleaned_at = step
        for run, waiting in enumerate(self.waiting):
            old = [event for event in waiting.values() if event.step + MOST_AHEAD < step]
            self._report_missing(old, run)
            for event in old:
                del waiting[event.key]

    def _compare(self, a: DiffEvent, b: DiffEvent) -> None:
        for outcome in compare(a, b, self._location):
            self.compared[outcome.where.value] += 1
            if outcome.differ:
                self._differences.append(RankDifference(a.position, a, outcome, self._location.rank))
            elif not any(known.outcome.where is outcome.where for known in self._differences):
                key = (a.module, outcome.where)
                self.agreed[key] = max(self.agreed.get(key, a.step), a.step)

    def _report_missing(self, events: list[DiffEvent], run: int) -> None:
        """Report events of one run only. Only writes and skipped steps count; other records may be missing."""
        for event in events:
            if not self._timelines[1 - run].passed(event):
                continue
            which = "AB"[run]
            if isinstance(event.record, SkipRecord):
                outcome = RecordDiff(DiffSource.FORWARDS, True)
                text = f"run {which} skipped an optimizer step (GradScaler), the other run did not"
            elif isinstance(event.record, DigestRecord) and event.record.stage == Stage.REWRITTEN.value:
                outcome = RecordDiff(DiffSource.REWRITTEN, True, written(event))
                text = f"parameters were written before this step in run {which} only"
            else:
                continue
            self._differences.append(
                RankDifference(event.position, event, outcome, self._location.rank, text)
            )


def _divergences(
    differences: list[RankDifference], agreed: dict[tuple[int, DiffSource], int]
) -> list[FirstDifference]:
    groups: dict[tuple[int, int, DiffSource], list[RankDifference]] = {}
    for difference in differences:
        event, where = difference.event, difference.outcome.where
        groups.setdefault((event.module, event.step, where), []).append(difference)
    ordered = sorted(
        groups.items(), key=lambda item: (min(d.position for d in item[1]), ORDER[item[0][2]], item[0][0])
    )
    divergences = [_divergence(*key, group) for key, group in ordered]
    divergences = _with_names(divergences)
    return [replace(p, agreed_until=_until(p, agreed)) for p in divergences]


def _divergence(
    module: int, step: int, where: DiffSource, differences: list[RankDifference]
) -> FirstDifference:
    order = differences[0].event.names
    differing = {name for one in differences for name in one.outcome.names or ()}
    names = [name for name in order if name in differing]
    name = names[0] if names else None
    values: list[Value] = []
    for one in differences:
        by_name = one.outcome.values or {}
        values += by_name.get(name, ()) if name is not None else one.outcome.values_without_name
    messages = [one.message for one in differences if one.message]
    if where is DiffSource.HYPER:
        texts = {f"{value.what} is {value.a} in run A and {value.b} in run B": None for value in values}
        messages = [", ".join(list(texts)[:3])]
    return FirstDifference(
        step=step,
        stage=where,
        module=module,
        parameter=name,
        differing=len(names),
        tensors=len(order),
        ranks=tuple(sorted({one.rank for one in differences})),
        message=messages[0] if messages else "",
        values=tuple(values[:_MOST_VALUES]),
    )


def _with_names(divergences: list[FirstDifference]) -> list[FirstDifference]:
    """Applied gradients have no names; take them from the parameters after the step."""
    after = {
        (divergence.module, divergence.step): divergence
        for divergence in divergences
        if divergence.stage is DiffSource.PARAMS
    }
    named = []
    for divergence in divergences:
        params = after.get((divergence.module, divergence.step))
        if divergence.parameter is None and divergence.stage is DiffSource.APPLIED and params is not None:
            norms = tuple(value for value in params.values if value.what != "digest")
            divergence = replace(
                divergence,
                parameter=params.parameter,
                differing=params.differing,
                values=(divergence.values + norms)[:_MOST_VALUES],
            )
        named.append(divergence)
    return named


def _until(divergence: FirstDifference, agreed: dict[tuple[int, DiffSource], int]) -> int | None:
    step = agreed.get((divergence.module, divergence.stage))
    return step if step is not None and step < divergence.step else None
