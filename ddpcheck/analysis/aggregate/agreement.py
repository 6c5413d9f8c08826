"""Compares ranks moment by moment as their records come in, and forgets each moment once all have spoken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ddpcheck.analysis.aggregate.pending import PendingValues
from ddpcheck.analysis.module_key import ModuleKey, members
from ddpcheck.analysis.timeseries.agreement import AgreementSeries
from ddpcheck.records.schema import AppliedRecord, DigestRecord, Stage, TensorKind

# A rank may be missing for good: more moments than this do not wait for anyone. Ranks that are read in turn,
# or that train together, are never that far apart.
MOST_PENDING = 4096
# Looks at optimizer state that not all ranks took part in, as under a sharded optimizer at every step.
MOST_PARTIAL = 256
# An enum's value takes a while to get, and these are asked for with every record.
_STATE, _REWRITTEN = TensorKind.STATE.value, Stage.REWRITTEN.value
_IN_BOOKS = (Stage.INIT_AFTER.value, Stage.PARAMS.value)

# What a rank says of a moment.
Sighting = DigestRecord | AppliedRecord
_Said = TypeVar("_Said")


class ComparisonKey(NamedTuple):
    """One thing looked at on every rank at the same point of the job."""

    module: ModuleKey
    stage: str
    of: str
    step: int
    optimizer: int = -1
    # Only for sharded optimizer state: ranks that hold other parts have nothing in common.
    part: str = ""


@dataclass(frozen=True)
class Disagreement:
    """A moment at which ranks did not all say the same."""

    moment: ComparisonKey
    sightings: Mapping[int, Sighting]

    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Ranks by what they said, the largest group first."""
        return groups_of({rank: record.root for rank, record in self.sightings.items()})

    def odd_ranks(self) -> tuple[int, ...]:
        return odd_ranks([ranks for _, ranks in self.groups()])


def groups_of(said: Mapping[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    by_root: dict[str, list[int]] = {}
    for rank in sorted(said):
        by_root.setdefault(said[rank], []).append(rank)
    ordered = sorted(by_root.items(), key=lambda item: (-len(item[1]), item[1]))
    return [(root, tuple(ranks)) for root, ranks in ordered]


def comparable(said: Mapping[int, _Said], hashes: Mapping[int, str]) -> Mapping[int, _Said]:
    """Digests of different kinds tell nothing of each other: only those of ranks that most others hash like."""
    if len(set(hashes.values())) < 2:
        return said
    _, ranks = groups_of({rank: hashes.get(rank, "") for rank in said})[0]
    return {rank: said[rank] for rank in ranks}


def odd_ranks(groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The minority; where there is no majority nobody can be called odd, and all are named."""
    everyone = sorted(rank for group in groups for rank in group)
    largest = max(groups, key=len)
    if 2 * len(largest) <= len(everyone):
        return tuple(everyone)
    return tuple(rank for rank in everyone if rank not in largest)


@dataclass
class ComparisonStats:
    """What came of all comparisons of one kind."""

    compared: int = 0
    differing: int = 0
    first: Disagreement | None = None


@dataclass
class Agreement:
    """All comparisons of one attempt."""

    tallies: dict[tuple[ModuleKey, str, str], ComparisonStats] = field(default_factory=dict)
    # First step at which the hyperparameters, and the number of forwards behind a step, were not the same.
    hyper: dict[ModuleKey, Disagreement] = field(default_factory=dict)
    forwards: dict[ModuleKey, Disagreement] = field(default_factory=dict)
    rewritten: dict[ModuleKey, Disagreement] = field(default_factory=dict)
    # Optimizer state that some ranks have and others do not: loaded there alone, or sharded.
    partial_state: list[Disagreement] = field(default_factory=list)
    # The course of each module's parameters over the steps.
    books: dict[ModuleKey, AgreementSeries] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    # By rank, how it hashes.
    hashes: dict[int, str] = field(default_factory=dict)
    # Ranks on which part of ddpcheck is off: their digests hold, what stands beside them may be stale.
    impaired: set[int] = field(default_factory=set)
    _pending: PendingValues[ComparisonKey, Sighting] = field(default_factory=PendingValues)
    _rewrites: dict[ComparisonKey, dict[int, DigestRecord]] = field(default_factory=dict)
    _agreed: dict[ModuleKey, DigestRecord] = field(default_factory=dict)

    def add(self, rank: int, module: ModuleKey, record: Sighting) -> None:
        part = record.hyper if isinstance(record, DigestRecord) and record.of == _STATE else ""
        optimizer = -1 if record.optimizer is None else record.optimizer
        moment = ComparisonKey(module, record.stage, record.of, record.step, optimizer, part)
        if isinstance(record, DigestRecord) and record.stage == _REWRITTEN:
            self._rewrites.setdefault(moment, {})[rank] = record
            return
        if self._pending.hear(moment, members(module), rank, record):
            self._finish(moment)
        elif len(self._pending) > MOST_PENDING:
            self._finish(self._pending.oldest())

    def end_rank(self, rank: int) -> None:
        """Nothing more comes from this rank: moments that waited only for it are complete."""
        self.ended.add(rank)
        for moment in sorted(self._pending.leave(rank)):
            self._finish(moment)

    def end_all(self) -> None:
        for moment in sorted(self._pending):
            self._finish(moment)

    def tally(self, module: ModuleKey, stage: Stage, of: TensorKind) -> ComparisonStats:
        return self.tallies.get((module, stage.value, of.value), ComparisonStats())

    def _finish(self, moment: ComparisonKey) -> None:
        everyone = self._pending.take(moment)
        said = comparable(everyone, self.hashes)
        if moment.stage == Stage.PARAMS.value:
            self._compare_rewrites(moment, said)
        if moment.of == TensorKind.STATE.value and len(everyone) < len(moment.module[0]):
            self._keep_partial(Disagreement(moment, said))
        if len(said) < 2:
            return
        tally = self.tallies.setdefault((moment.module, moment.stage, moment.of), ComparisonStats())
        tally.compared += 1
        if moment.of == TensorKind.PARAMETERS.value and moment.stage in _IN_BOOKS:
            book = self.books.setdefault(moment.module, AgreementSeries())
            book.note(moment.step, moment.module[0], {rank: record.root for rank, record in said.items()})
            book.differing.note(moment.step, list(_digests(said)))
        found = Disagreement(moment, said)
        if len({record.root for record in said.values()}) > 1:
            tally.differing += 1
            if tally.first is None or moment.step < tally.first.moment.step:
                tally.first = found
        elif moment.of == TensorKind.PARAMETERS.value:
            self._agreed[moment.module] = next(_digests(said))
        if moment.stage == Stage.PARAMS.value:
            sound = list(_digests({r: record for r, record in said.items() if r not in self.impaired}))
            if len({record.hyper for record in sound}) > 1:
                self.hyper.setdefault(moment.module, found)
            if len({record.forward for record in sound}) > 1:
                self.forwards.setdefault(moment.module, found)

    def _keep_partial(self, found: Disagreement) -> None:
        if len(self.partial_state) < MOST_PARTIAL:
            self.partial_state.append(found)

    def _compare_rewrites(self, moment: ComparisonKey, said: Mapping[int, Sighting]) -> None:
        """Were parameters equal before this step? Who rewrote nothing stands where all last agreed."""
        due = sorted(
            before
            for before in self._rewrites
            if (before.module, before.optimizer) == (moment.module, moment.optimizer)
            and before.step <= moment.step
        )
        for before in due:
            rewrites = self._rewrites.pop(before)
            if moment.module in self.rewritten or self._parted(moment.module):
                continue
            last = self._agreed.get(moment.module)
            # With --every, steps went by unseen: of a rank that rewrote nothing we then know only that.
            fresh = last is not None and (last.step == before.step - 1 or last.step < 0)
            stood = {rank: rewrites.get(rank, last if fresh else None) for rank in said}
            known = {rank: record for rank, record in stood.items() if record is not None}
            if len({record.root for record in known.values()}) > 1 or len(known) < len(said):
                self.rewritten[moment.module] = Disagreement(before, known)

    def _parted(self, module: ModuleKey) -> bool:
        return self.tally(module, Stage.PARAMS, TensorKind.PARAMETERS).first is not None


def _digests(said: Mapping[int, Sighting]) -> Iterator[DigestRecord]:
    return (record for record in said.values() if isinstance(record, DigestRecord))
