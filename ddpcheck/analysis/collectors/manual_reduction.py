"""What a job made of gradients that it reduces itself: their mean, their sum, or not the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.agreement import MOST_PENDING, PendingValues, groups_of
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.analysis.allreduce.mean_check import SketchTable, can_check, check_parts, parts_of
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.gradients import ManualReductionRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class PartlyReduced:
    """A step whose gradients the job has reduced, but not all of them, or not over all ranks."""

    step: int
    # Indices of parameters of which every rank applies its own gradient, while others are reduced.
    left_out: tuple[int, ...] = ()
    # Where ranks reduce in groups: each group, with single ranks that reduce with no other.
    groups: tuple[Ranks, ...] = ()
    # The ranks that apply what was reduced over all ranks, where others apply something else.
    received_by: Ranks = ()


@dataclass
class ManualReductionStats:
    """What the job made of the gradients of a module, in the steps that were sketched."""

    means: int = 0
    # Steps with the sum of the ranks' gradients, not divided, and the first of them.
    sums: int = 0
    first_sum: int = -1
    # Whether the loss of these steps is a mean over the rank's own batch that nothing scales.
    own_mean: bool = True
    # Steps with the mean divided by the number of ranks again, the loss being such a mean of one backward.
    divided_twice: int = 0
    first_divided_twice: int = -1
    # Of steps in which ranks applied different gradients.
    partly: dict[int, PartlyReduced] = field(default_factory=dict)

    @property
    def reduced(self) -> bool:
        """Whether the job is known to reduce these gradients itself."""
        return bool(self.means or self.sums or self.divided_twice or self.partly)


class ManualReductionCollector(Collector):
    """Compares applied gradients with the mean and with the sum of the local ones."""

    def __init__(self, attempt: Attempt) -> None:
        self.stats: dict[ModuleKey, ManualReductionStats] = {}
        self._pending: PendingValues[tuple[ModuleKey, int, int], ManualReductionRecord] = PendingValues()

    @collects_per_module(ManualReductionRecord)
    def add(self, rank: RankData, module: ModuleKey, record: ManualReductionRecord) -> None:
        key = (module, record.step, record.optimizer)
        if self._pending.add(key, module[0], rank.number, record):
            records = self._pending.take(key)
            if len(records) == len(module[0]) > 1:
                self._compare(module, rank.latest[module].parameters, records)
        elif len(self._pending) > MOST_PENDING:
            self._pending.take(self._pending.oldest())

    def _compare(
        self,
        module: ModuleKey,
        parameters: Sequence[Sequence[Any]],
        records: Mapping[int, ManualReductionRecord],
    ) -> None:
        try:
            gradients = _Gradients(parameters, records)
        except ValueError:
            return  # a damaged record
        first = next(iter(records.values()))
        indices = list(gradients.known())
        if not indices:
            return
        stats = self.stats.setdefault(module, ManualReductionStats())
        if len({record.applied for record in records.values()}) > 1:
            partly = gradients.partly_reduced(first.step, indices)
            if partly is not None:
                stats.partly[first.step] = partly
            return
        size = len(records)
        if gradients.all_divided_by(size, indices):
            stats.means += 1
        elif gradients.all_divided_by(1, indices):
            stats.first_sum = first.step if not stats.sums else min(stats.first_sum, first.step)
            stats.sums += 1
            stats.own_mean &= all(record.own_mean for record in records.values())
        elif all(record.own_mean and record.backwards == 1 for record in records.values()) and (
            gradients.all_divided_by(size * size, indices)
        ):
            known = stats.first_divided_twice
            stats.first_divided_twice = min(known, first.step) if stats.divided_twice else first.step
            stats.divided_twice += 1


class _Gradients:
    """The sketches of one step, of all ranks."""

    def __init__(
        self, parameters: Sequence[Sequence[Any]], records: Mapping[int, ManualReductionRecord]
    ) -> None:
        self._parameters = parameters
        self._ranks = tuple(sorted(records))
        self._local = SketchTable({rank: record.local for rank, record in records.items()})
        self._applied = SketchTable({rank: record.applied for rank, record in records.items()})
        self._absent = set().union(*(record.absent for record in records.values()))

    def known(self) -> Iterator[int]:
        """Indices of the parameters that can be compared."""
        for index, row in enumerate(self._parameters):
            if index in self._absent or not can_check(str(row[1])) or index >= len(self._local):
                continue
            parts = self._local.parts(index)
            if parts.known and parts.norms:
                yield index

    def all_divided_by(self, divisor: int, indices: Sequence[int]) -> bool:
        """Whether all ranks together apply the sum of their gradients over `divisor`."""
        return all(self._is(index, self._ranks, divisor, self._ranks[0]) for index in indices)

    def _is(self, index: int, ranks: Ranks, divisor: int, rank: int) -> bool:
        """Whether `rank` applies the sum of the gradients of `ranks` over `divisor`."""
        result, local = self._applied.at(rank, index), [self._local.at(each, index) for each in ranks]
        if result is None or not result.known or None in local:
            return False
        row = self._parameters[index]
        parts = parts_of(each for each in local if each is not None)
        return check_parts(parts, result, str(row[1]), math.prod(row[2]), divisor).ok

    def partly_reduced(self, step: int, indices: Sequence[int]) -> PartlyReduced | None:
        """None: the gradients of no parameter are known to be reduced, or of some it is not known what became."""
        left_out: list[int] = []
        results: set[tuple[tuple[Ranks, ...], Ranks]] = set()
        for index in indices:
            if self._is_kept(index, self._ranks):
                # Ranks that compute the same gradients need not reduce them.
                if len({self._local.at(rank, index) for rank in self._ranks}) > 1:
                    left_out.append(index)
                continue
            result = self._result(index)
            if result is None:
                return None
            results.add(result)
        if len(results) != 1:
            return None
        groups, received_by = results.pop()
        return PartlyReduced(step, tuple(left_out), groups, received_by)

    def _is_kept(self, index: int, ranks: Ranks) -> bool:
        """Whether each of these ranks applies its own gradient."""
        return all(self._applied.at(rank, index) == self._local.at(rank, index) for rank in ranks)

    def _result(self, index: int) -> tuple[tuple[Ranks, ...], Ranks] | None:
        """`groups` and `received_by` of one parameter; None: it is not known what some ranks apply."""
        roots = {rank: repr(self._applied.at(rank, index)) for rank in self._ranks}
        groups = tuple(sorted(ranks for _, ranks in groups_of(roots)))
        if len(groups) == 1:
            return ((), ()) if self._is_shared(index, self._ranks, groups[0]) else None
        received = [ranks for ranks in groups if self._is_shared(index, self._ranks, ranks)]
        if received:
            return (), received[0]
        within = all(self._is_shared(index, ranks, ranks) for ranks in groups)
        together = [ranks for ranks in groups if len(ranks) > 1]
        # Ranks with the same batch apply the same gradients, too.
        reduced = together and not any(self._is_kept(index, ranks) for ranks in together)
        return (groups, ()) if within and reduced else None

    def _is_shared(self, index: int, contributing: Ranks, applying: Ranks) -> bool:
        """Whether `applying` apply the mean or the sum of the gradients of `contributing`."""
        return any(self._is(index, contributing, divisor, applying[0]) for divisor in {len(contributing), 1})


def partly_reduced_text(partly: PartlyReduced, ranks: Ranks) -> str:
    """Over which ranks the gradients are reduced, and which apply them; empty: over all, and all do."""
    together = [group for group in partly.groups if len(group) > 1]
    alone = tuple(sorted(rank for group in partly.groups if len(group) == 1 for rank in group))
    if partly.received_by:
        others = tuple(rank for rank in ranks if rank not in partly.received_by)
        return f"{name_ranks(others)} {_do(others)} not apply the reduced gradients"
    if not together:
        return ""
    within = " and within ".join(map(name_ranks, together))
    return f"reduced within {within}, not over all ranks" + (
        f"; {name_ranks(alone)} {'takes' if len(alone) == 1 else 'take'} no part" if alone else ""
    )


def _do(ranks: Ranks) -> str:
    return "does" if len(ranks) == 1 else "do"
