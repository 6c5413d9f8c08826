"""Collects what the backwards of each rank start from, and how many of them contribute to a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.records.kinds.state import GradientStart, GradientStartRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.step_window import Window

# Changes of the number of backwards that are kept for each rank.
MOST_CHANGES = 4096
_SYNCED = "synced"


@dataclass(frozen=True)
class AccumulationDifference:
    """Consecutive steps in which ranks differ in the same way."""

    first: int
    # The last step; None: until the end.
    last: int | None
    # A value of `GradientStart`, or a number of backwards, by rank.
    values: Mapping[int, Any]


class AccumulationCollector(Collector):
    """By module and rank, the changes of both; a rank writes or keeps a bounded number of them."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.starts: dict[ModuleKey, dict[int, list[GradientStartRecord]]] = {}
        # By module and optimizer, then by rank: steps and the number of backwards from there on; None: not known.
        self._counts: dict[tuple[ModuleKey, int], dict[int, list[tuple[int, int | None]]]] = {}
        self.steps: dict[tuple[ModuleKey, int], dict[int, int]] = {}
        # By module and optimizer: how many steps of all ranks had this number of reduced backwards.
        self.reduced: dict[tuple[ModuleKey, int], Counter[int]] = {}

    def add_window(self, window: Window) -> None:
        for stream in window.of(AppliedRecord):
            constants = stream.constants
            key = (stream.module, constants["optimizer"])
            self.reduced.setdefault(key, Counter())[constants["synced"]] += len(stream) * len(stream.ranks)
            for rank in stream.ranks:
                self._add_count(rank, key, int(stream.steps[0]), constants["synced"] + constants["unsynced"])
                self.steps[key][rank.number] = int(stream.steps[-1]) + 1

    @collects_per_module(GradientStartRecord)
    def add_start(self, rank: RankData, module: ModuleKey, record: GradientStartRecord) -> None:
        self.starts.setdefault(module, {}).setdefault(rank.number, []).append(record)

    @collects_per_module(AppliedRecord)
    def add_applied(self, rank: RankData, module: ModuleKey, record: AppliedRecord) -> None:
        # Steps after a backward that DDP did not reduce have findings of their own.
        count = record.synced + record.unsynced if record.last == _SYNCED else None
        key = (module, record.optimizer)
        self.reduced.setdefault(key, Counter())[record.synced] += 1
        self._add_count(rank, key, record.step, count)

    def _add_count(self, rank: RankData, key: tuple[ModuleKey, int], step: int, count: int | None) -> None:
        changes = self._counts.setdefault(key, {}).setdefault(rank.number, [])
        self.steps.setdefault(key, {})[rank.number] = step + 1
        if (not changes or changes[-1][1] != count) and len(changes) < MOST_CHANGES:
            changes.append((step, count))

    def different_starts(
        self, module: ModuleKey, until: Mapping[int, int]
    ) -> list[tuple[AccumulationDifference, GradientStartRecord]]:
        """Where some ranks start from old gradients, with the record of one of them. `until`: steps by rank."""
        by_rank = {rank: self.starts.get(module, {}).get(rank, []) for rank in until}
        changes = {
            rank: [(0, GradientStart.CLEARED.value), *((each.step, each.start) for each in records)]
            for rank, records in by_rank.items()
        }
        # After its last record the state of a rank is not known.
        ends = {
            rank: min(until[rank], records[-1].step + 1) if records and records[-1].last else until[rank]
            for rank, records in by_rank.items()
        }
        differing = []
        for difference in differences(changes, ends):
            old = [rank for rank, value in difference.values.items() if value != GradientStart.CLEARED.value]
            before = [each for rank in old for each in by_rank[rank] if each.step <= difference.first]
            differing.append((difference, before[-1]))
        return differing

    def different_counts(
        self, module: ModuleKey, optimizer: int, until: Mapping[int, int]
    ) -> list[AccumulationDifference]:
        """Where ranks step after different numbers of backwards."""
        by_rank = self._counts.get((module, optimizer), {})
        steps = self.steps.get((module, optimizer), {})
        ends = {
            rank: by_rank[rank][-1][0] if len(by_rank[rank]) >= MOST_CHANGES else steps[rank]
            for rank in until
            if rank in by_rank
        }
        return differences({rank: by_rank[rank] for rank in ends}, ends)

    def optimizers(self, module: ModuleKey) -> list[int]:
        return sorted(optimizer for key, optimizer in self._counts if key == module)


def differences(
    changes: Mapping[int, Sequence[tuple[int, Any]]], ends: Mapping[int, int]
) -> list[AccumulationDifference]:
    """Ranges of steps in which the values of ranks differ, from the steps at which each rank's value changes.

    A rank takes part until its end, and while its value is known.
    """
    steps = sorted({step for of_rank in changes.values() for step, _ in of_rank} | set(ends.values()))
    position = dict.fromkeys(changes, 0)
    points: list[tuple[int, tuple[tuple[int, Any], ...]]] = []
    for step in steps:
        values = []
        for rank, of_rank in changes.items():
            while position[rank] + 1 < len(of_rank) and of_rank[position[rank] + 1][0] <= step:
                position[rank] += 1
            first, value = of_rank[position[rank]] if of_rank else (step + 1, None)
            if first <= step < ends[rank] and value is not None:
                values.append((rank, value))
        differ = len({value for _, value in values}) > 1
        points.append((step, tuple(values) if differ else ()))
    differing = []
    for values_of, run in groupby(points, key=lambda point: point[1]):
        members = list(run)
        if values_of:
            after = next((step for step, _ in points if step > members[-1][0]), None)
            last = None if after is None or after >= max(ends.values()) else after - 1
            differing.append(AccumulationDifference(members[0][0], last, dict(values_of)))
    return differing
