"""Checks each reduced backward as the ranks' sketches come in: is the result the mean of what went in?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ddpcheck.analysis.aggregate.agreement import comparable
from ddpcheck.analysis.aggregate.pending import PendingValues
from ddpcheck.analysis.allreduce.mean_check import (
    Compared,
    MeanCheckResult,
    can_check,
    check_parts,
    what_instead,
)
from ddpcheck.analysis.allreduce.sketch_table import NOTHING, Parts, SketchTable
from ddpcheck.analysis.module_key import ModuleKey, members
from ddpcheck.analysis.timeseries.gradients import GradientSeries
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.sketch_shares import shares

LIVE_RANKS = -1
# A rank may be silent for long, or for good: more backwards than this do not wait for anyone.
MOST_PENDING = 1024


@dataclass(frozen=True)
class MeanMismatch:
    """A parameter whose reduced gradient is not the mean of the local ones."""

    number: int
    step: int
    place: int
    outcome: MeanCheckResult
    # The rank whose copy of the reduced gradient was compared.
    rank: int


@dataclass(frozen=True)
class NonFinite:
    """The first values that were not finite."""

    number: int
    step: int
    ranks: tuple[int, ...]
    # The first in the order of the backward.
    place: int
    count: int
    # How many of the maker's gradients had any.
    gradients: int = 0


@dataclass
class MeanCheckStats:
    """What came of all reduced backwards of one module."""

    checked: int = 0
    missed: int = 0
    first: MeanMismatch | None = None
    # What that first result is instead of the mean, where it is something that has a name.
    instead: str = ""
    # Largest error over the gradient's norm, for hooks that lose precision on purpose.
    worst_relative: float = 0.0
    # Ranks whose own gradients were the same to the last bit, and in how many backwards.
    twins: dict[tuple[int, ...], int] = field(default_factory=dict)
    nonfinite: NonFinite | None = None
    # First backward whose result was not the same on all ranks, and the last step before with one that was:
    # not every step is sketched.
    parted: tuple[int, int] | None = None
    together_until: int = -1
    # Steps before it at which all ranks got the same, as stretches from one to another.
    together: list[tuple[int, int]] = field(default_factory=list)
    # Backwards after which every rank still held its very own gradient: nothing was reduced at all.
    untouched: int = 0
    # The last step, before the first of those, at which gradients were reduced.
    touched_until: int = -1


@dataclass
class AllReduceVerifier:
    """All reduced backwards of an attempt; each is forgotten once all ranks have spoken of it."""

    tallies: dict[ModuleKey, MeanCheckStats] = field(default_factory=dict)
    # Modules that train inside join(): ranks that have run out of data add zeros and write nothing.
    joined: set[ModuleKey] = field(default_factory=set)
    # Ranks that may have had gradients without writing of them.
    lost: set[int] = field(default_factory=set)
    # By rank, how it hashes.
    hashes: Mapping[int, str] = field(default_factory=dict)
    books: dict[ModuleKey, GradientSeries] = field(default_factory=dict)
    _pending: PendingValues[tuple[ModuleKey, int], BackwardRecord] = field(default_factory=PendingValues)
    # How many ranks had ended and were lost when that was last looked at.
    _left: tuple[int, int] = (0, 0)
    _descriptions: dict[ModuleKey, ModuleRecord] = field(default_factory=dict)

    def add(
        self,
        rank: int,
        module: ModuleKey,
        record: BackwardRecord,
        description: ModuleRecord,
        ended: Collection[int],
    ) -> None:
        """`ended`: ranks from which nothing more comes."""
        if rank not in members(module):
            return
        self._descriptions[module] = description
        # The counts first: they are asked for with every record.
        if self._left != (len(ended), len(self.lost)):
            self._left = (len(ended), len(self.lost))
            self._let_go({*ended, *self.lost})
        if self._pending.add((module, record.number), members(module), rank, record):
            self._finish(module, record.number)
        elif len(self._pending) > MOST_PENDING:
            # Perhaps that rank has only not been read yet: who took part cannot be told.
            self._finish(*self._pending.oldest(), early=True)

    def _let_go(self, ranks: Collection[int]) -> None:
        """A backward that waited for them alone is looked at in the end, like all that are left then."""
        for rank in self._pending.active(ranks):
            self._pending.end_rank(rank)

    def end(self) -> None:
        for module, number in sorted(self._pending):
            self._finish(module, number)

    def _finish(self, module: ModuleKey, number: int, early: bool = False) -> None:
        said = self._pending.take((module, number))
        tally = self.tallies.setdefault(module, MeanCheckStats())
        try:
            local = SketchTable({rank: record.local for rank, record in said.items()})
            reduced = SketchTable({rank: record.reduced for rank, record in said.items() if record.reduced})
        except (TypeError, ValueError):
            return  # a damaged record
        self._note_nonfinite(tally, said)
        # Without sketches, a backward was only looked through for values that are not finite.
        if len(module[0]) < 2 or not any(record.local for record in said.values()):
            return
        self._note_twins(tally, said, local)
        self._compare_results(tally, number, said)
        whole = not early and len(local) > 0 and self._all_known(module, said)
        misses, off_mean = self._misses(said, local, reduced, module, tally) if whole else ([], None)
        book = self.books.setdefault(module, GradientSeries(len(module[0])))
        # Shares of some ranks are no norm of the whole.
        book.note(min(one.step for one in said.values()), local, reduced if whole else None, off_mean)
        if not whole:
            return
        tally.checked += 1
        if misses:
            tally.missed += 1
            if tally.first is None:
                tally.first = max(misses, key=lambda miss: miss.outcome.ratio)

    def _compare_results(
        self, tally: MeanCheckStats, number: int, said: Mapping[int, BackwardRecord]
    ) -> None:
        if tally.parted is not None or len(said) < 2:
            return
        step = min(record.step for record in said.values())
        if len({record.root for record in comparable(said, self.hashes).values()}) > 1:
            tally.parted = (number, step)
        else:
            tally.together_until = max(tally.together_until, step)
            if tally.together and step in (tally.together[-1][1], tally.together[-1][1] + 1):
                tally.together[-1] = (tally.together[-1][0], step)
            else:
                tally.together.append((step, step))

    def _all_known(self, module: ModuleKey, said: Mapping[int, BackwardRecord]) -> bool:
        """Whether the mean can be told: not where a rank had a share in it that we do not know."""
        silent = set(module[0]) - set(said)
        return not silent or (module in self.joined and not silent & self.lost)

    def _misses(
        self,
        said: Mapping[int, BackwardRecord],
        local: SketchTable,
        reduced: SketchTable,
        module: ModuleKey,
        tally: MeanCheckStats,
    ) -> tuple[list[MeanMismatch], float | None]:
        """And how far the worst of all is off, over what rounding explains."""
        group, rows = module[0], self._descriptions[module].parameters
        dealt = shares(self._descriptions[module])
        misses: list[MeanMismatch] = []
        unreduced: list[MeanMismatch] = []
        compared: list[Compared] = []
        worst: float | None = None
        for rank, record in said.items():
            divisor = len(said) if record.divisor == LIVE_RANKS else len(group)
            for place, result in zip(dealt[rank], reduced.row(rank), strict=False):
                row = rows[place]
                if place in record.absent or not can_check(row[1]):
                    continue
                parts = local.parts(place) if place < len(local) else NOTHING
                outcome = check_parts(parts, result, row[1], math.prod(row[2]), divisor)
                worst = max(worst or 0.0, outcome.ratio)
                compared.append(Compared(parts, result, row[1], math.prod(row[2]), place))
                if not outcome.ok:
                    misses.append(MeanMismatch(record.number, record.step, place, outcome, rank))
                    own = local.at(rank, place)
                    if own is not None and result.value == own.value:
                        unreduced.append(misses[-1])
                tally.worst_relative = max(tally.worst_relative, _relative(outcome, parts, divisor))
        if misses and tally.first is None:
            tally.instead = what_instead(compared, local, group)
        # One rank's word for a few parameters is not enough: a broken reduction may leave one as it was.
        several = len(misses) * 2 > len(compared) or len({miss.rank for miss in unreduced}) > 1
        if misses and len(unreduced) == len(misses) and several:
            tally.untouched += 1
        elif not tally.untouched:
            tally.touched_until = max(record.step for record in said.values())
        return misses, worst

    def _note_nonfinite(self, tally: MeanCheckStats, said: Mapping[int, BackwardRecord]) -> None:
        """Where did it start: before the reduction only the ranks that made it have it.

        Between sketches only they write of it, so the first backward may be the last to be looked at.
        """
        record = next(iter(said.values()))
        if tally.nonfinite is not None and tally.nonfinite.number <= record.number:
            return
        makers = {rank: one for rank, one in said.items() if one.local_nonfinite}
        found = makers[min(makers)].local_nonfinite if makers else _reduced_nonfinite(said)
        if found:
            text = next(iter(found))
            place = int(text) if text.isdigit() else 0
            count = sum(one.local_nonfinite.get(text, 0) for one in makers.values())
            ranks = tuple(sorted(makers or said))
            among = len(found) if makers else 0
            tally.nonfinite = NonFinite(record.number, record.step, ranks, place, count, among)

    def _note_twins(
        self, tally: MeanCheckStats, said: Mapping[int, BackwardRecord], local: SketchTable
    ) -> None:
        by_sketch: dict[str, list[int]] = {}
        for rank, record in said.items():
            if local.any_gradient(rank) and local.all_known(rank):
                by_sketch.setdefault(record.local, []).append(rank)
        for ranks in by_sketch.values():
            if len(ranks) > 1:
                key = tuple(sorted(ranks))
                tally.twins[key] = tally.twins.get(key, 0) + 1


def _reduced_nonfinite(said: Mapping[int, BackwardRecord]) -> dict[str, int]:
    """Each rank tells of its share; by place."""
    found = {place: count for record in said.values() for place, count in record.reduced_nonfinite.items()}
    return dict(sorted(found.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 0))


def _relative(outcome: MeanCheckResult, parts: Parts, divisor: int) -> float:
    """The error over the size of what went in."""
    known = parts.norm if parts.known else sum(n * count for n, count in parts.norms if math.isfinite(n))
    size = known / divisor
    return outcome.error / size if size and math.isfinite(outcome.error) else 0.0
