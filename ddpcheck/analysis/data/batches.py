"""Compares what ranks trained on, forward by forward, and keeps counts only."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpcheck.analysis.aggregate.pending import RollCall
from ddpcheck.analysis.loss_by_count import CountBook
from ddpcheck.analysis.module_key import ModuleKey, members
from ddpcheck.records.schema import BatchRecord

# A batch that the same rank has just had says nothing about other ranks: inputs that never change.
REMEMBERED = 8
REMEMBERED_PARTS = 128
# Forwards that wait for a rank which never comes to them.
MOST_PENDING = 4096
MOST_KINDS = 64
# Ranks' shares of a step that differ by less than this are taken as equal.
TOLERANCE = 1.1

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sight:
    """Where something was seen, and what each rank said."""

    step: int
    forward: int
    said: Mapping[int, str | int]
    variety: int = 0


@dataclass
class Sames:
    """How often which ranks said the same where they should not."""

    compared: int = 0
    same: int = 0
    by_ranks: Counter[Ranks] = field(default_factory=Counter)
    first: Sight | None = None
    variety: int = 0

    def add(self, groups: list[Ranks], sight: Sight) -> None:
        self.same += 1
        self.variety = max(self.variety, sight.variety)
        if self.first is None:
            self.first = sight
        for ranks in groups:
            if ranks in self.by_ranks or len(self.by_ranks) < MOST_KINDS:
                self.by_ranks[ranks] += 1

    def ranks(self) -> Ranks:
        """The ranks that most often went together."""
        return max(self.by_ranks.items(), key=lambda item: (item[1], len(item[0])))[0]


@dataclass
class Counts:
    """How unequal the ranks' counts of one kind were."""

    compared: int = 0
    uneven: int = 0
    worst: Sight | None = None
    ratio: float = 1.0
    # Per rank, how often it had which count.
    usual: dict[int, Counter[int]] = field(default_factory=dict)
    totals: Counter[int] = field(default_factory=Counter)
    book: CountBook = field(default_factory=lambda: CountBook(TOLERANCE))

    def add(self, step: int, forward: int, said: Mapping[int, int]) -> None:
        if len(said) < 2:
            return
        self.compared += 1
        self.book.add(step, said)
        for rank, count in said.items():
            seen = self.usual.setdefault(rank, Counter())
            if count in seen or len(seen) < MOST_KINDS:
                seen[count] += 1
            self.totals[rank] += count
        ratio = max(said.values()) / min(said.values())
        if ratio > TOLERANCE:
            self.uneven += 1
            if ratio > self.ratio:
                self.ratio, self.worst = ratio, Sight(step, forward, dict(said))

    def regular(self) -> bool:
        """Whether each rank has one size of batch that it mostly keeps to, as loaders make them."""
        return all(2 * max(seen.values()) >= self.compared for seen in self.usual.values())


@dataclass
class ModuleBatches:
    """All comparisons of one module's inputs."""

    forwards: int = 0
    # Forwards at which ranks did not stand at the same step: nothing can be compared there.
    apart: int = 0
    batches: Sames = field(default_factory=Sames)
    draws: Sames = field(default_factory=Sames)
    # Random numbers drawn before the forward, and handed to the model as one of several tensors.
    drawn_inputs: Sames = field(default_factory=Sames)
    rows: Counts = field(default_factory=Counts)
    tokens: Counts = field(default_factory=Counts)
    attended: Counts = field(default_factory=Counts)
    _recent: dict[int, deque[str]] = field(default_factory=dict)
    _recent_parts: dict[int, deque[str]] = field(default_factory=dict)

    def compare(self, forward: int, said: Mapping[int, BatchRecord]) -> None:
        steps = {forward if record.step is None else record.step for record in said.values()}
        if len(steps) > 1:
            self.apart += 1
            return
        step = steps.pop()
        self.forwards += 1
        self._compare_batches(step, forward, said)
        self._compare_draws(step, forward, said)
        self._compare_drawn_inputs(step, forward, said)
        self.rows.add(step, forward, _counts(said, "rows"))
        self.tokens.add(step, forward, _counts(said, "tokens"))
        self.attended.add(step, forward, _counts(said, "attended"))

    def _compare_batches(self, step: int, forward: int, said: Mapping[int, BatchRecord]) -> None:
        fresh: dict[int, str] = {}
        for rank, record in said.items():
            recent = self._recent.setdefault(rank, deque(maxlen=REMEMBERED))
            if record.digest and record.digest not in recent:
                recent.append(record.digest)
                fresh[rank] = record.digest
        if len(fresh) < 2:
            return
        self.batches.compared += 1
        groups = _together(fresh)
        if groups:
            variety = min(said[rank].variety for rank in groups[0])
            self.batches.add(groups, Sight(step, forward, fresh, variety))

    def _compare_draws(self, step: int, forward: int, said: Mapping[int, BatchRecord]) -> None:
        drew = {rank: record.drew for rank, record in said.items() if record.drew}
        if len(drew) < 2:
            return
        self.draws.compared += 1
        groups = _together(drew)
        if groups:
            self.draws.add(groups, Sight(step, forward, drew))

    def _compare_drawn_inputs(self, step: int, forward: int, said: Mapping[int, BatchRecord]) -> None:
        """The same part in batches that differ, on ranks that drew the same numbers just before."""
        drew = {rank: record for rank, record in said.items() if record.parts}
        if len(drew) < 2:
            return
        self.drawn_inputs.compared += 1
        fresh: dict[int, set[str]] = {}
        for rank, record in drew.items():
            recent = self._recent_parts.setdefault(rank, deque(maxlen=REMEMBERED_PARTS))
            fresh[rank] = {part for part in record.parts if part and part not in recent}
            recent.extend(record.parts)
        groups = [
            ranks
            for ranks in _together({rank: record.drew_before for rank, record in drew.items()})
            if set.intersection(*(fresh[rank] for rank in ranks))
            and len({drew[rank].digest for rank in ranks}) > 1
        ]
        if groups:
            self.drawn_inputs.add(
                groups, Sight(step, forward, {r: one.drew_before for r, one in drew.items()})
            )


def _counts(said: Mapping[int, BatchRecord], name: str) -> dict[int, int]:
    """Only where every rank tells: a rank without the count may be doing something else altogether."""
    counts = {rank: int(getattr(record, name)) for rank, record in said.items()}
    return counts if all(count > 0 for count in counts.values()) else {}


def _together(said: Mapping[int, str]) -> list[Ranks]:
    """Ranks that said the same, the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank], []).append(rank)
    several = [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]
    return sorted(several, key=lambda ranks: (-len(ranks), ranks))


class Batches:
    """Takes records as they come and compares a forward once all ranks have spoken."""

    def __init__(self) -> None:
        self.modules: dict[ModuleKey, ModuleBatches] = {}
        self._pending: RollCall[tuple[ModuleKey, int], BatchRecord] = RollCall()

    def add(self, rank: int, module: ModuleKey, record: BatchRecord) -> None:
        place = (module, record.forward)
        if self._pending.hear(place, members(module), rank, record):
            self._finish(place)
        elif len(self._pending) > MOST_PENDING:
            self._finish(self._pending.oldest())

    def end_rank(self, rank: int) -> None:
        for place in self._pending.leave(rank):
            self._finish(place)

    def end_all(self) -> None:
        for place in sorted(self._pending):
            self._finish(place)

    def _finish(self, place: tuple[ModuleKey, int]) -> None:
        said = self._pending.take(place)
        if len(said) > 1:
            self.modules.setdefault(place[0], ModuleBatches()).compare(place[1], said)
