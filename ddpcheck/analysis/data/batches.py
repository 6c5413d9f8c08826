"""Compares what ranks trained on, forward by forward, and keeps counts only."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpcheck.analysis.aggregate.pending import PendingValues
from ddpcheck.analysis.module_key import ModuleKey, members
from ddpcheck.records.kinds.data import BatchRecord

# Ranks that are looked at, and steps; of a long job every so-manieth, as the losses are kept.
MOST_RANKS = 16
MOST_STEPS = 1024
LEAST_STEPS = 3
# Between the slopes of a mean and of a sum, and how many standard errors it has to be away from there.
BETWEEN = 0.5
ERRORS = 2.5
# By so much may the data of one rank be harder than that of another all along, in logarithms.
HARDER = 0.1

# By rank and step.
Losses = Mapping[int, Mapping[int, float]]


@dataclass
class LossByCount:
    """By step, what each rank counted; only steps at which they did not count the same."""

    tolerance: float
    every: int = 1
    steps: dict[int, dict[int, int]] = field(default_factory=dict)
    _step: int = -1
    _counted: dict[int, int] = field(default_factory=dict)

    def add(self, step: int, said: Mapping[int, int]) -> None:
        """A forward; those of one step add up, as their losses do."""
        if step != self._step:
            self._close()
            self._step = step
        for rank in sorted(said)[:MOST_RANKS]:
            self._counted[rank] = self._counted.get(rank, 0) + said[rank]

    def _close(self) -> None:
        counted, self._counted = self._counted, {}
        if self._step % self.every or len(counted) < 2:
            return
        if max(counted.values()) > self.tolerance * min(counted.values()):
            self.steps[self._step] = counted
        while len(self.steps) > MOST_STEPS:
            self.every *= 2
            self.steps = {step: said for step, said in self.steps.items() if step % self.every == 0}

    def grows(self, losses: Losses) -> bool:
        """Whether losses clearly grow with the counts. False also where that cannot be told."""
        self._close()
        rows = [row for step, said in self.steps.items() if (row := _row(step, said, losses))]
        if len(rows) < LEAST_STEPS:
            return False
        ranks = sorted(set.intersection(*(set(row) for row in rows)))
        if len(ranks) < 2:
            return False
        counts = _centred([[row[rank][0] for rank in ranks] for row in rows])
        values = _centred([[row[rank][1] for rank in ranks] for row in rows])
        return _within(counts, values) or _between(counts, values)


def _row(step: int, said: Mapping[int, int], losses: Losses) -> dict[int, tuple[float, float]]:
    """By rank the logarithms of count and loss; nothing of a step with a loss that has none."""
    row = {}
    for rank, count in said.items():
        loss = losses.get(rank, {}).get(step, 0.0)
        if not (0.0 < loss < math.inf) or count <= 0:
            return {}
        row[rank] = (math.log(count), math.log(loss))
    return row


def _centred(table: list[list[float]]) -> list[list[float]]:
    """Over the ranks of each step: how training goes along is the same for all."""
    return [[value - sum(row) / len(row) for value in row] for row in table]


def _means(table: list[list[float]]) -> list[float]:
    return [sum(column) / len(table) for column in zip(*table, strict=True)]


def _within(counts: list[list[float]], values: list[list[float]]) -> bool:
    """By what each rank's counts do from step to step: whose data is harder does not matter."""
    usual_count, usual_value = _means(counts), _means(values)
    xs = [x - usual for row in counts for x, usual in zip(row, usual_count, strict=True)]
    ys = [y - usual for row in values for y, usual in zip(row, usual_value, strict=True)]
    spread = sum(x * x for x in xs)
    free = (len(counts) - 1) * (len(usual_count) - 1) - 1
    if spread < 1e-6 or free < 1:
        return False
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    left = sum((y - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope - ERRORS * math.sqrt(left / free / spread) > BETWEEN


def _between(counts: list[list[float]], values: list[list[float]]) -> bool:
    """By ranks that have more than others all along: only where that is more than harder data explains."""
    xs, ys = _means(counts), _means(values)
    spread = sum(x * x for x in xs)
    if spread < 1e-6:
        return False
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    return slope - ERRORS * HARDER / math.sqrt(spread) > BETWEEN


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
class BatchFingerprints:
    """Where something was seen, and what each rank said."""

    step: int
    forward: int
    said: Mapping[int, str | int]
    variety: int = 0


@dataclass
class SameBatches:
    """How often which ranks said the same where they should not."""

    compared: int = 0
    same: int = 0
    by_ranks: Counter[Ranks] = field(default_factory=Counter)
    first: BatchFingerprints | None = None
    variety: int = 0

    def add(self, groups: list[Ranks], sight: BatchFingerprints) -> None:
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
    worst: BatchFingerprints | None = None
    ratio: float = 1.0
    # Per rank, how often it had which count.
    usual: dict[int, Counter[int]] = field(default_factory=dict)
    totals: Counter[int] = field(default_factory=Counter)
    book: LossByCount = field(default_factory=lambda: LossByCount(TOLERANCE))

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
                self.ratio, self.worst = ratio, BatchFingerprints(step, forward, dict(said))

    def regular(self) -> bool:
        """Whether each rank has one size of batch that it mostly keeps to, as loaders make them."""
        return all(2 * max(seen.values()) >= self.compared for seen in self.usual.values())


@dataclass
class ModuleBatches:
    """All comparisons of one module's inputs."""

    forwards: int = 0
    # Forwards at which ranks did not stand at the same step: nothing can be compared there.
    apart: int = 0
    batches: SameBatches = field(default_factory=SameBatches)
    draws: SameBatches = field(default_factory=SameBatches)
    # Random numbers drawn before the forward, and handed to the model as one of several tensors.
    drawn_inputs: SameBatches = field(default_factory=SameBatches)
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
            self.batches.add(groups, BatchFingerprints(step, forward, fresh, variety))

    def _compare_draws(self, step: int, forward: int, said: Mapping[int, BatchRecord]) -> None:
        drew = {rank: record.drew for rank, record in said.items() if record.drew}
        if len(drew) < 2:
            return
        self.draws.compared += 1
        groups = _together(drew)
        if groups:
            self.draws.add(groups, BatchFingerprints(step, forward, drew))

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
                groups, BatchFingerprints(step, forward, {r: one.drew_before for r, one in drew.items()})
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
        self._pending: PendingValues[tuple[ModuleKey, int], BatchRecord] = PendingValues()

    def add(self, rank: int, module: ModuleKey, record: BatchRecord) -> None:
        place = (module, record.forward)
        if self._pending.add(place, members(module), rank, record):
            self._finish(place)
        elif len(self._pending) > MOST_PENDING:
            self._finish(self._pending.oldest())

    def end_rank(self, rank: int) -> None:
        for place in self._pending.end_rank(rank):
            self._finish(place)

    def end_all(self) -> None:
        for place in sorted(self._pending):
            self._finish(place)

    def _finish(self, place: tuple[ModuleKey, int]) -> None:
        said = self._pending.take(place)
        if len(said) > 1:
            self.modules.setdefault(place[0], ModuleBatches()).compare(place[1], said)
