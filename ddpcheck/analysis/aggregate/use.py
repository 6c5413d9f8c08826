"""The values with which parameters are used after a step, and what becomes of a difference right after it.

Replicas must agree where their parameters are used: at the next forward, before the next step, or at the end of the
job. A difference right after `optimizer.step()` that is gone by then is no divergence: with a sharded step, each rank
steps its own part of the parameters and receives the other parts afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.records.kinds.digests import DigestRecord, Stage

Key = TypeVar("Key")
# Steps of a rank whose use is not known yet: more than one only if several optimizers step the same module.
_MOST_OPEN = 16
# Steps at which all replicas took over the same new values, kept for the report.
_MOST_STEPS = 64
_PARAMS, _USED = Stage.PARAMS.value, Stage.USED.value


@dataclass
class _StepValues(Generic[Key]):
    """The parameters of one rank after a step, until they are used."""

    key: Key
    step: int
    optimizer: int | None
    forward: int
    root: str


class ParameterUse(Generic[Key]):
    """By step, the digest of each rank's parameters when they were used next.

    A rank records its parameters after a step, and again before the next step if they were written in between. If it
    does not, they are unchanged.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[ModuleKey, int], list[_StepValues[Key]]] = {}
        self._used: dict[Key, dict[int, str]] = {}

    def add(self, rank: int, module: ModuleKey, key: Key, record: DigestRecord) -> list[Key]:
        """Add the next record of parameters of a rank. Returns the steps whose use is known from here on."""
        known: list[Key] = []
        before = self._open.get((module, rank))
        after = []
        for values in before or ():
            if _is_use(values, record):
                # A step reads the values as the last record before it states them.
                root = values.root if record.stage == _PARAMS else record.root
                self._used.setdefault(values.key, {})[rank] = root
                known.append(values.key)
            else:
                values.root = record.root
                after.append(values)
        if record.stage == _PARAMS and record.optimizer is not None:
            after.append(_StepValues(key, record.step, record.optimizer, record.forward or 0, record.root))
        if before or after:
            self._open[module, rank] = after[-_MOST_OPEN:]
        return known

    def end_rank(self, rank: int) -> list[Key]:
        """The rank records nothing more: its parameters are used as they were recorded last."""
        known = []
        for (_, number), waiting in self._open.items():
            if number == rank:
                for values in waiting:
                    self._used.setdefault(values.key, {})[rank] = values.root
                    known.append(values.key)
                waiting.clear()
        return known

    def of(self, key: Key, ranks: Iterable[int]) -> dict[int, str] | None:
        """The digests with which these ranks use their parameters after a step; None if not all are known."""
        used = self._used.get(key, {})
        return {rank: used[rank] for rank in ranks} if used.keys() >= set(ranks) else None

    def known(self, key: Key) -> Mapping[int, str]:
        return self._used.get(key, {})

    def forget(self, key: Key) -> None:
        self._used.pop(key, None)


def _is_use(values: _StepValues[Key], record: DigestRecord) -> bool:
    if record.stage == _USED:
        return record.step >= values.step
    if (record.forward or 0) > values.forward:
        return True
    # A job that bypasses the wrapper runs no forward of it.
    return record.optimizer == values.optimizer and record.step > values.step


@dataclass
class Reunions:
    """How often replicas of a module that differed after a step were equal again when they were used."""

    count: int = 0
    # Steps after which replicas that had been used with different values took over the same new values on every rank,
    # as an average of the replicas is.
    averaged: list[int] = field(default_factory=list)
    _diverged: bool = False

    def add(self, step: int, after_step: Mapping[int, str], used: Mapping[int, str]) -> None:
        self.count += 1
        on_all_ranks = all(used[rank] != root for rank, root in after_step.items())
        if self._diverged and on_all_ranks and len(self.averaged) < _MOST_STEPS:
            self.averaged.append(step)
        self._diverged = False

    def add_difference(self) -> None:
        """Replicas were used with different values."""
        self._diverged = True
