"""Compares what ranks must have in common although each one steps another part of the parameters.

Hyperparameters, dtypes and shapes, and the number of steps. The shards themselves have no replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData, has_no_replica, is_sharded
from ddpcheck.analysis.step_coverage.collector import StepCoverageCollector
from ddpcheck.records.kinds.coverage import NotCompared

_MISSING = "missing"


@dataclass(frozen=True)
class SettingsDifference:
    """Hyperparameters of an optimizer of shards that differ across ranks, at the first such step."""

    optimizer: int
    name: str
    step: int
    # By name of the hyperparameter and rank.
    values: Mapping[str, Mapping[int, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """In the form of the evidence of DDP206."""
        return [_row(self.optimizer, name, by_rank) for name, by_rank in self.values.items()]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(next(iter(self.values.values()))))


def _row(optimizer: int, name: str, by_rank: Mapping[int, Any]) -> dict[str, Any]:
    group, _, short = name.partition(".")
    of_group = group.isdigit()
    return {
        "optimizer": optimizer,
        "group": int(group) if of_group else None,
        "name": short if of_group else name,
        "by_rank": {str(rank): value for rank, value in by_rank.items()},
    }


def unreplicated(attempt: Attempt) -> list[ModuleKey]:
    """Sets of parameters without replica that more than one rank has."""
    keys = {key for rank in attempt.ranks.values() for key in rank.latest if has_no_replica(key)}
    return sorted(key for key in keys if len(attempt.of_module(key)) > 1)


def shard_optimizers(attempt: Attempt) -> dict[int, dict[int, str]]:
    """The optimizers that step shards: by number and rank, their classes."""
    settings: dict[int, dict[int, str]] = {}
    for number, rank in attempt.ranks.items():
        for (optimizer, module), record in rank.optimizers.items():
            if is_sharded(module):
                settings.setdefault(optimizer, {})[number] = record.name
    return {optimizer: names for optimizer, names in settings.items() if len(names) > 1}


def settings_differences(attempt: Attempt) -> list[SettingsDifference]:
    """At most one for each optimizer. None if ranks took different numbers of steps, as DDP207 reports.

    The same step then belongs to different batches, and to different values of a schedule.
    """
    settings = [
        _first_difference(optimizer, {rank: attempt.ranks[rank] for rank in names}, names, steps)
        for optimizer, names in sorted(shard_optimizers(attempt).items())
        if len(set(names.values())) == 1 and (steps := _common_steps(attempt, names))
    ]
    return [difference for difference in settings if difference is not None]


def _common_steps(attempt: Attempt, ranks: Iterable[int]) -> int:
    """Steps that all ranks are known to have taken; 0: ranks that finished took different numbers."""
    steps = attempt.collector(StepCoverageCollector).steps
    counts = [steps(rank) for rank in ranks]
    finished = all(attempt.ranks[rank].counts_steps for rank in ranks)
    return 0 if finished and len(set(counts)) > 1 else min(counts)


def _first_difference(
    optimizer: int, ranks: Mapping[int, RankData], names: Mapping[int, str], steps: int
) -> SettingsDifference | None:
    changes = {
        number: {record.step: record.changed for record in rank.hyper if record.optimizer == optimizer}
        for number, rank in ranks.items()
    }
    now = {number: dict(rank.hyper_before.get(optimizer, {})) for number, rank in ranks.items()}
    for step in sorted({step for of_rank in changes.values() for step in of_rank if step < steps}):
        for number, of_rank in changes.items():
            now[number].update(of_rank.get(step, {}))
        differing = {
            name: by_rank for name, by_rank in _by_name(now) if len(set(map(repr, by_rank.values()))) > 1
        }
        if differing:
            return SettingsDifference(optimizer, next(iter(names.values())), step, differing)
    return None


def _by_name(values: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, dict[int, Any]]]:
    first = next(iter(values.values()))
    if all(of_rank == first for of_rank in values.values()):
        return
    for name in sorted({name for of_rank in values.values() for name in of_rank}):
        yield name, {number: of_rank.get(name, _MISSING) for number, of_rank in values.items()}


def described_differently(attempt: Attempt, module: ModuleKey) -> dict[str, dict[int, str]]:
    """Parameters without replica whose dtype, shape or training differs across ranks: by name and rank."""
    rows = {
        number: {
            str(row[0]): f"{row[1]} {row[2]}{'' if row[3] else ' frozen'}"
            for row in rank.latest[module].parameters
        }
        for number, rank in attempt.of_module(module).items()
    }
    first = next(iter(rows.values()))
    if all(of_rank == first for of_rank in rows.values()):
        return {}
    names = sorted({name for of_rank in rows.values() for name in of_rank})
    settings = {
        name: {number: of_rank.get(name, _MISSING) for number, of_rank in rows.items()} for name in names
    }
    return {name: by_rank for name, by_rank in settings.items() if len(set(by_rank.values())) > 1}


def shard_steps(attempt: Attempt) -> dict[tuple[str, str], dict[int, int]]:
    """Steps of the optimizers of parameters without replica, by class and line, and by rank."""
    settings: dict[tuple[str, str], dict[int, int]] = {}
    for number, entries in attempt.collector(StepCoverageCollector).entries.items():
        for entry in entries.values():
            if NotCompared.SHARDED.value in entry.not_compared:
                of_rank = settings.setdefault((entry.name, entry.where), {})
                of_rank[number] = max(entry.steps, of_rank.get(number, 0))
    return {key: steps for key, steps in settings.items() if len(steps) > 1}
