"""Collects the state in effect at each rank's training forwards, and finds where ranks differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.records.kinds.state import StateRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

_MODE, _TRAINED = "training", "requires_grad"
# A rank writes no more states after a fault in one of these.
STATE_PROBES = ("agent", "program_state")


class StateItem(str, Enum):
    """What kind of state differs, in the order of reports."""

    MODE = "mode"
    FROZEN = "frozen"
    SETTING = "setting"
    AUTOCAST = "autocast"
    PRECISION = "precision"
    # Another number of threads sums in another order: last bits of a rank's own gradients.
    THREADS = "threads"
    # Python's: another order of sets of texts.
    HASH_SEED = "hash seed"


def kind_of(key: str) -> StateItem:
    _, separator, attribute = key.rpartition(":")
    if separator:
        return {_MODE: StateItem.MODE, _TRAINED: StateItem.FROZEN}.get(attribute, StateItem.SETTING)
    if key == "threads":
        return StateItem.THREADS
    if key == "hash_seed":
        return StateItem.HASH_SEED
    return StateItem.AUTOCAST if key.startswith("autocast") else StateItem.PRECISION


def resolve(state: Mapping[str, Any], key: str) -> Any:
    """The value of a key. A mode that is not listed is that of the whole module; other parameters are trained."""
    if key not in state:
        attribute = key.rpartition(":")[2]
        if attribute == _MODE:
            return state.get(f":{_MODE}")
        return True if attribute == _TRAINED else None
    return state[key]


@dataclass(frozen=True)
class RankState:
    """The state of one rank from a step on, until its next one."""

    step: int
    values: Mapping[str, Any]
    where: str
    every: int
    last: bool


@dataclass(frozen=True)
class StateDifference:
    """Settings of one kind that differ across ranks in the training forwards of some steps."""

    kind: StateItem
    # The first and the last step; None: until the end.
    first: int
    last: int | None
    # By key, the value of each rank at the first step.
    values: Mapping[str, Mapping[int, Any]]
    # Line of the forward by rank.
    where: Mapping[int, str]
    # The difference may have begun this many steps before, less one.
    every: int

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks with equal values, the largest group first."""
        ranks = next(iter(self.values.values()))
        texts = {rank: repr([by_rank[rank] for by_rank in self.values.values()]) for rank in ranks}
        return [members for _, members in groups_of(texts)]


@dataclass
class _States:
    by_rank: dict[int, list[RankState]] = field(default_factory=dict)


class StateCollector(Collector):
    """States by module and rank. A rank writes a bounded number of changes."""

    def __init__(self, attempt: Attempt) -> None:
        self._modules: dict[ModuleKey, _States] = {}
        # Ranks usually have the same state: one object for all of them.
        self._shared: dict[tuple[ModuleKey, int], dict[str, Any]] = {}

    @collects_per_module(StateRecord)
    def add(self, rank: RankData, module: ModuleKey, record: StateRecord) -> None:
        states = self._modules.setdefault(module, _States()).by_rank.setdefault(rank.number, [])
        values = dict(states[-1].values) if states else {}
        values.update(record.changed)
        values = {key: value for key, value in values.items() if value is not None}
        known = self._shared.setdefault((module, len(states)), values)
        shared = known if known == values else values
        states.append(RankState(record.step, shared, record.where, record.every, record.last))

    def ranks(self, module: ModuleKey) -> Mapping[int, Sequence[RankState]]:
        differing = self._modules.get(module)
        return {} if differing is None else differing.by_rank

    def differences(self, module: ModuleKey, until: Mapping[int, int]) -> list[StateDifference]:
        """The first difference of each kind. `until`: by rank, the number of its steps."""
        by_rank = {rank: states for rank, states in self.ranks(module).items() if rank in until}
        steps = sorted({state.step for states in by_rank.values() for state in states})
        open_: dict[StateItem, StateDifference] = {}
        for step in steps:
            states = _at(by_rank, step, until)
            differing = _differing(states)
            for kind, known in open_.items():
                if known.last is None and not (differing.get(kind, {}).keys() & known.values.keys()):
                    open_[kind] = _closed(known, step - 1)
            for kind, values in differing.items():
                before = open_.get(kind)
                # A passing difference may come from reading at different steps.
                if before is None or (before.last is not None and not _lasts(before)):
                    open_[kind] = StateDifference(
                        kind,
                        step,
                        None,
                        values,
                        {rank: state.where for rank, state in states.items()},
                        max(state.every for state in states.values()),
                    )
        return [open_[kind] for kind in StateItem if kind in open_ and _lasts(open_[kind])]


def _at(
    by_rank: Mapping[int, Sequence[RankState]], step: int, until: Mapping[int, int]
) -> dict[int, RankState]:
    """The state of each rank at a step, without ranks that have ended before or whose states are not known."""
    differing = {}
    for rank, states in by_rank.items():
        before = [state for state in states if state.step <= step]
        if before and step < until[rank] and not (before[-1].last and before[-1].step < step):
            differing[rank] = before[-1]
    return differing


def _differing(states: Mapping[int, RankState]) -> dict[StateItem, dict[str, dict[int, Any]]]:
    differing: dict[StateItem, dict[str, dict[int, Any]]] = {}
    distinct = list({id(state.values): state.values for state in states.values()}.values())
    if len(distinct) < 2:
        return differing
    for key in dict.fromkeys(key for values in distinct for key in values):
        texts = {repr(resolve(values, key)) for values in distinct}
        if len(texts) > 1:
            by_rank = {rank: resolve(state.values, key) for rank, state in sorted(states.items())}
            if None in by_rank.values() and kind_of(key) is not StateItem.AUTOCAST:
                # Not there on some ranks, or not readable: other rules compare the structure of modules.
                continue
            differing.setdefault(kind_of(key), {})[key] = by_rank
    return differing


def _closed(difference: StateDifference, last: int) -> StateDifference:
    return StateDifference(
        difference.kind, difference.first, last, difference.values, difference.where, difference.every
    )


def _lasts(difference: StateDifference) -> bool:
    """Whether the difference is not an effect of reading modules at intervals."""
    if difference.last is None or difference.kind in (StateItem.AUTOCAST, StateItem.FROZEN):
        return True
    if difference.kind is StateItem.MODE and ":training" in difference.values:
        return True
    return difference.last - difference.first + 1 >= difference.every
