"""Compares two runs of the same job rank by rank, to the bit, and finds the first moment at which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ddpcheck.diff.events import DiffEvent, Key, Timeline
from ddpcheck.diff.model import AFTERMATH, ORDER, DiffSource, FirstDifference, Value
from ddpcheck.diff.record_diff import DiffLocation, RecordDiff, compare, written
from ddpcheck.diff.run_input import RunInput
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.optimizers import SkipRecord

# Steps by which one run may be read ahead of the other before a moment counts as missing there.
MOST_AHEAD = 64
_MOST_VALUES = 64


@dataclass(frozen=True)
class Difference:
    """One rank's part in a parting."""

    turn: int
    moment: DiffEvent
    outcome: RecordDiff
    rank: int
    message: str = ""


@dataclass
class ExactResult:
    """All partings in order, and how often each stage was compared."""

    partings: list[FirstDifference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    # Last step that both runs reached, on the rank that came furthest.
    common: int = -1


def compare_exactly(a: RunInput, b: RunInput) -> ExactResult:
    """Ranks one after the other; what is read of a rank ends soon after the first difference of all."""
    result = ExactResult()
    differences: list[Difference] = []
    agreed: dict[tuple[int, DiffSource], int] = {}
    same_version = a.recorded_by == b.recorded_by
    for rank in sorted(a.headers.keys() & b.headers.keys()):
        walk = RankWalk(a, b, DiffLocation(rank, same_version))
        earliest = min((difference.moment.step for difference in differences), default=None)
        differences += walk.differences(earliest)
        result.compared.update(walk.compared)
        result.common = max(result.common, walk.common)
        for place, step in walk.agreed.items():
            agreed[place] = min(agreed.get(place, step), step)
    result.partings = _partings(differences, agreed)
    return result


class RankWalk:
    """One rank through both runs, side by side."""

    def __init__(self, a: RunInput, b: RunInput, seat: DiffLocation) -> None:
        self._sides = (Timeline(a.records(seat.rank)), Timeline(b.records(seat.rank)))
        self.waiting: tuple[dict[Key, DiffEvent], dict[Key, DiffEvent]] = ({}, {})
        self._seat = seat
        self.compared: Counter[str] = Counter()
        # By module and stage, the last step before the first difference at which the runs agreed.
        self.agreed: dict[tuple[int, DiffSource], int] = {}
        self.common = -1
        self._forgotten = 0
        self._found: list[Difference] = []

    def differences(self, earliest: int | None) -> list[Difference]:
        last = None if earliest is None else earliest + AFTERMATH
        for side, moment in self._moments():
            other = self.waiting[1 - side].pop(moment.key, None)
            if other is None:
                self.waiting[side][moment.key] = moment
            else:
                self._compare(*((moment, other) if side == 0 else (other, moment)))
            if self._found and last is None:
                last = min(difference.moment.step for difference in self._found) + AFTERMATH
            if last is not None and min(timeline.step for timeline in self._sides) > last:
                break
            self._forget()
        self._settle_missing(list(self.waiting[0].values()), 0)
        self._settle_missing(list(self.waiting[1].values()), 1)
        self.common = min(timeline.step for timeline in self._sides)
        return [difference for difference in self._found if last is None or difference.moment.step <= last]

    def _moments(self) -> Iterator[tuple[int, DiffEvent]]:
        """From whichever run is behind, so that few moments wait for their counterpart."""
        while not all(timeline.over for timeline in self._sides):
            behind = min((n for n in (0, 1) if not self._sides[n].over), key=lambda n: self._sides[n].step)
            moment = next(self._sides[behind], None)
            if moment is not None:
                yield behind, moment

    def _forget(self) -> None:
        """Not at every moment: looking through all that waits would take longer than reading."""
        step = min(timeline.step for timeline in self._sides)
        if step < self._forgotten + MOST_AHEAD:
            return
        self._forgotten = step
        for side, waiting in enumerate(self.waiting):
            old = [moment for moment in waiting.values() if moment.step + MOST_AHEAD < step]
            self._settle_missing(old, side)
            for moment in old:
                del waiting[moment.key]

    def _compare(self, a: DiffEvent, b: DiffEvent) -> None:
        for outcome in compare(a, b, self._seat):
            self.compared[outcome.where.value] += 1
            if outcome.differ:
                self._found.append(Difference(a.turn, a, outcome, self._seat.rank))
            elif not any(found.outcome.where is outcome.where for found in self._found):
                place = (a.module, outcome.where)
                self.agreed[place] = max(self.agreed.get(place, a.step), a.step)

    def _settle_missing(self, moments: list[DiffEvent], side: int) -> None:
        """Of most records one run may rightly have fewer; a write or a step left out is a difference."""
        for moment in moments:
            if not self._sides[1 - side].passed(moment):
                continue
            which = "AB"[side]
            if isinstance(moment.record, SkipRecord):
                outcome = RecordDiff(DiffSource.FORWARDS, True)
                text = f"run {which} left out an optimizer step (GradScaler), the other run did not"
            elif isinstance(moment.record, DigestRecord) and moment.record.stage == Stage.REWRITTEN.value:
                outcome = RecordDiff(DiffSource.REWRITTEN, True, written(moment))
                text = f"parameters were written before this step in run {which} only"
            else:
                continue
            self._found.append(Difference(moment.turn, moment, outcome, self._seat.rank, text))


def _partings(
    differences: list[Difference], agreed: dict[tuple[int, DiffSource], int]
) -> list[FirstDifference]:
    groups: dict[tuple[int, int, DiffSource], list[Difference]] = {}
    for difference in differences:
        moment, where = difference.moment, difference.outcome.where
        groups.setdefault((moment.module, moment.step, where), []).append(difference)
    ordered = sorted(
        groups.items(), key=lambda item: (min(d.turn for d in item[1]), ORDER[item[0][2]], item[0][0])
    )
    partings = [_parting(*key, found) for key, found in ordered]
    partings = _with_names(partings)
    return [replace(p, agreed_until=_until(p, agreed)) for p in partings]


def _parting(module: int, step: int, where: DiffSource, found: list[Difference]) -> FirstDifference:
    order = found[0].moment.names
    differing = {name for one in found for name in one.outcome.names or ()}
    names = [name for name in order if name in differing]
    name = names[0] if names else None
    values: list[Value] = []
    for one in found:
        by_name = one.outcome.values or {}
        values += by_name.get(name, ()) if name is not None else one.outcome.said
    messages = [one.message for one in found if one.message]
    if where is DiffSource.HYPER:
        told = {f"{value.what} is {value.a} in run A and {value.b} in run B": None for value in values}
        messages = [", ".join(list(told)[:3])]
    return FirstDifference(
        step=step,
        stage=where,
        module=module,
        parameter=name,
        differing=len(names),
        tensors=len(order),
        ranks=tuple(sorted({one.rank for one in found})),
        message=messages[0] if messages else "",
        values=tuple(values[:_MOST_VALUES]),
    )


def _with_names(partings: list[FirstDifference]) -> list[FirstDifference]:
    """Applied gradients come without names: the parameters after the step tell."""
    after = {
        (parting.module, parting.step): parting for parting in partings if parting.stage is DiffSource.PARAMS
    }
    named = []
    for parting in partings:
        told = after.get((parting.module, parting.step))
        if parting.parameter is None and parting.stage is DiffSource.APPLIED and told is not None:
            norms = tuple(value for value in told.values if value.what != "digest")
            parting = replace(
                parting,
                parameter=told.parameter,
                differing=told.differing,
                values=(parting.values + norms)[:_MOST_VALUES],
            )
        named.append(parting)
    return named


def _until(parting: FirstDifference, agreed: dict[tuple[int, DiffSource], int]) -> int | None:
    step = agreed.get((parting.module, parting.stage))
    return step if step is not None and step < parting.step else None
