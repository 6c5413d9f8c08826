"""Collects what ddpcheck cost each rank, and how often the budget let it check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.analysis.cost.model import CostTable, LeftOut, RankCost, SchedulePart
from ddpcheck.config import parse_budget
from ddpcheck.records.kinds.folds import FoldedRecord
from ddpcheck.records.kinds.timing import CostRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# A record names its probes; only this many names are kept.
_MOST_PROBES = 32
_FURTHER_PROBES = "other"
# The budget changes its schedule a few times; further changes extend the last part.
_MOST_PARTS = 64
_MOST_RANKS = 256

# Fields of a folded cost record: times by probe, and the schedule.
_SPENT = "spent."
_EVERY = ("sketch_every", "applied_every", "params_every")

_Intervals = tuple[int, int, int]


@dataclass
class _Part:
    """Consecutive records with the same schedule."""

    first: int
    end: int
    every: _Intervals
    steps: int = 0
    wall: int = 0
    spent: int = 0


@dataclass
class RankCosts:
    """Sums over the records of one rank."""

    steps: int = 0
    wall: int = 0
    # -1: a record did not know it.
    device: int = 0
    by_probe: dict[str, int] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)
    # The step after the last one.
    end: int = 0
    # Of the latest record; None: no time was measured.
    latest_share: float | None = None

    @property
    def spent(self) -> int:
        return sum(self.by_probe.values())

    def add(self, record: CostRecord) -> None:
        steps, wall = max(0, record.steps), max(0, record.wall)
        self.steps += steps
        self.wall += wall
        self.device = -1 if self.device < 0 or record.device < 0 else self.device + record.device
        spent = 0
        for probe, took in record.spent.items():
            known = probe in self.by_probe or len(self.by_probe) < _MOST_PROBES
            name = probe if known else _FURTHER_PROBES
            self.by_probe[name] = self.by_probe.get(name, 0) + max(0, took)
            spent += max(0, took)
        self.end = max(self.end, record.step + steps)
        if steps:
            self.latest_share = _share(spent, wall)
            self._add_part(record, steps, wall, spent)

    def _add_part(self, record: CostRecord, steps: int, wall: int, spent: int) -> None:
        every = tuple(max(1, n) for n in (record.sketch_every, record.applied_every, record.params_every))
        last = self.parts[-1] if self.parts else None
        if last is None or (last.every != every and len(self.parts) < _MOST_PARTS):
            last = _Part(record.step, record.step, (every[0], every[1], every[2]))
            self.parts.append(last)
        last.end = max(last.end, record.step + steps)
        last.steps += steps
        last.wall += wall
        last.spent += spent


class CostCollector(Collector):
    """Cost by rank: a few sums, however long the job runs."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: dict[int, RankCosts] = defaultdict(RankCosts)

    @collects(CostRecord)
    def add(self, rank: RankData, record: CostRecord) -> None:
        self.ranks[rank.number].add(record)

    @collects(FoldedRecord)
    def add_folded(self, rank: RankData, record: FoldedRecord) -> None:
        """The sums of several records."""
        if record.of != CostRecord.kind:
            return
        spent = {
            name.removeprefix(_SPENT): round(row[1])
            for name, row in record.numbers.items()
            if name.startswith(_SPENT)
        }
        least_known = record.numbers.get("device", (0, 0, 0, 0))[2]
        self.ranks[rank.number].add(
            CostRecord(
                record.first,
                round(record.total("steps")),
                round(record.total("wall")),
                spent,
                -1 if least_known < 0 else round(record.total("device")),
                *(max(1, round(record.largest(name))) for name in _EVERY),
            )
        )

    def latest_share(self) -> float | None:
        """The share of a step in the latest record of each rank: the highest of all ranks."""
        shares = [costs.latest_share for costs in self.ranks.values() if costs.latest_share is not None]
        return max(shares, default=None)

    def intervals_at(self, step: int) -> _Intervals:
        """At every how many steps the AllReduce, applied gradients and parameters were checked then."""
        matching = [part.every for part in self._schedule() if part.first <= step < part.end]
        return matching[-1] if matching else (1, 1, 1)

    def steps_beyond_digests(self, rank: int) -> int:
        """Steps of a rank whose parameters were not compared at every step at the end; 0: its digests show them."""
        return self.ranks[rank].end if self.last_interval(rank) > 1 else 0

    def last_interval(self, rank: int) -> int:
        """At every how many steps the rank compared parameters at its end."""
        costs = self.ranks.get(rank)
        return costs.parts[-1].every[2] if costs is not None and costs.parts else 1

    def left_out(self) -> LeftOut:
        counts = [
            sum(part.end - part.first - _multiples(part.first, part.end, part.every[check]) for part in parts)
            for parts in [self._schedule()]
            for check in range(3)
        ]
        return LeftOut(*counts)

    def table(self, budget: object) -> CostTable | None:
        """None if no rank measured a step. `budget`: the setting, as it was given."""
        measured = {number: costs for number, costs in sorted(self.ranks.items()) if costs.steps}
        if not measured:
            return None
        rows = [_rank_cost(number, costs) for number, costs in measured.items()]
        highest = sorted(rows, key=lambda row: -(row.share or 0.0))
        kept = {row.rank for row in highest[:_MOST_RANKS]}
        spent, steps = (
            _total(measured, lambda costs: costs.spent),
            _total(measured, lambda costs: costs.steps),
        )
        names = {name for costs in measured.values() for name in costs.by_probe}
        by_probe = {name: _total(measured, lambda c, name=name: c.by_probe.get(name, 0)) for name in names}  # type: ignore[misc]
        return CostTable(
            budget=_percent(budget),
            cost_us=_mean(spent, steps),
            share=_share(spent, _total(measured, lambda costs: costs.wall)),
            by_probe=_descending({name: _mean(took, steps) for name, took in by_probe.items()}),
            highest=highest[0].rank,
            ranks=tuple(row for row in rows if row.rank in kept),
            of=len(rows),
            schedule=tuple(self._combined(part) for part in self._schedule()),
            left_out=self.left_out(),
        )

    def skips_allreduce(self, rank: int, step: int) -> bool:
        """Whether the budget of this rank left out the verification of the AllReduce at this step."""
        costs = self.ranks.get(rank)
        matching = (
            [part for part in costs.parts if part.first <= step < part.end] if costs is not None else []
        )
        return bool(matching) and step % matching[-1].every[0] != 0

    def _schedule(self) -> list[_Part]:
        """The sparsest schedule of all ranks: each node has its own, and only what all ranks check is compared."""
        own = {(part.first, part.end, part.every) for costs in self.ranks.values() for part in costs.parts}
        limits = sorted({limit for first, end, _ in own for limit in (first, end)})
        parts: list[_Part] = []
        for first, end in pairwise(limits):
            valid = [every for begin, until, every in own if begin <= first and end <= until]
            if not valid:
                continue
            every = (max(each[0] for each in valid), max(each[1] for each in valid), max(e[2] for e in valid))
            if parts and parts[-1].every == every and parts[-1].end == first:
                parts[-1].end = end
            else:
                parts.append(_Part(first, end, every))
        return parts

    def _combined(self, part: _Part) -> SchedulePart:
        """With the cost of all ranks in these steps; a rank whose schedule changes within them has it in proportion."""
        spent = wall = steps = 0.0
        for costs in self.ranks.values():
            for own in costs.parts:
                shared = min(own.end, part.end) - max(own.first, part.first)
                if shared > 0:
                    fraction = shared / (own.end - own.first)
                    spent += fraction * own.spent
                    wall += fraction * own.wall
                    steps += fraction * own.steps
        return SchedulePart(
            first_step=part.first,
            last_step=part.end - 1,
            allreduce_every=part.every[0],
            applied_every=part.every[1],
            params_every=part.every[2],
            cost_us=_mean(spent, steps),
            share=_share(spent, wall),
        )


def _rank_cost(number: int, costs: RankCosts) -> RankCost:
    return RankCost(
        rank=number,
        steps=costs.steps,
        step_us=_mean(max(0, costs.wall - costs.spent), costs.steps),
        cost_us=_mean(costs.spent, costs.steps),
        share=_share(costs.spent, costs.wall),
        by_probe=_descending({name: _mean(took, costs.steps) for name, took in costs.by_probe.items()}),
        device_us=None if costs.device < 0 else _mean(costs.device, costs.steps),
    )


def _total(ranks: Mapping[int, RankCosts], of: Callable[[RankCosts], int]) -> int:
    return sum(map(of, ranks.values()))


def _share(spent: float, wall: float) -> float | None:
    """ddpcheck's time over the job's own, so that 0.02 makes a step 2 % longer."""
    return round(spent / (wall - spent), 5) if wall > spent else None


def _mean(total: float, steps: float) -> float:
    return round(total / steps, 1) if steps else 0.0


def _descending(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: (-item[1], item[0])))


def _multiples(first: int, end: int, every: int) -> int:
    """How many steps from `first` to before `end` are multiples of `every`."""
    return (end - 1) // every - (first - 1) // every if end > first else 0


def _percent(budget: object) -> float | None:
    try:
        share = parse_budget(budget) if isinstance(budget, str) else None
    except ValueError:
        return None
    return None if share is None else round(100 * share, 4)


def budget_setting(description: Mapping[str, Any]) -> object:
    """The setting `budget` of a run's description."""
    config = description.get("config")
    return config.get("budget") if isinstance(config, dict) else None


def is_thinned(parts: Iterable[SchedulePart]) -> bool:
    """Whether any step was not checked completely."""
    return any(max(part.allreduce_every, part.applied_every, part.params_every) > 1 for part in parts)
