"""What remains of comparisons whose records were folded: how many there were, and whether ranks agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpcheck.analysis.aggregate.agreement import Agreement, ComparisonStats
from ddpcheck.analysis.aggregate.compared_steps import ComparedSteps
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.timeseries.collector import AgreementSeries
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.folds import FoldedRecord
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.records.summaries import MODULUS

_ROOT = "root"
# Stages at which a rank writes a digest only where there is a reason to, so that the others have none.
_NOT_EVERYWHERE = (Stage.REWRITTEN.value, Stage.USED.value, Stage.STATE.value)
# Module, stage, kind of tensors, optimizer.
_Key = tuple[ModuleKey, str, str, int]


@dataclass
class _Sum:
    """Of one rank in one fold."""

    rows: int
    first: int
    last: int
    digests: int

    def add(self, record: FoldedRecord) -> None:
        self.rows += record.rows
        self.first, self.last = min(self.first, record.first), max(self.last, record.last)
        self.digests = (self.digests + int(record.digests[_ROOT], 16)) % MODULUS


class FoldedComparisons:
    """Adds the sums of digests of all ranks to an `Agreement`. Records come in the order of the folds.

    Ranks whose sums are equal agreed at each of these steps: a sum is unequal if one digest is. The launcher states
    whether it had seen no difference when it folded them.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        # The fold that is being added, and its sums by rank.
        self._fold = -1
        self._agreed = False
        self._sums: dict[_Key, dict[int, _Sum]] = {}

    def add(self, rank: int, module: ModuleKey, record: FoldedRecord) -> None:
        where = _stage_of(record)
        if where is None or not _is_digest(record.digests.get(_ROOT)) or where[0] in _NOT_EVERYWHERE:
            return
        if record.fold != self._fold:
            self.compare()
            self._fold, self._agreed = record.fold, record.agreed
        sums = self._sums.setdefault((module, *where), {})
        sums.setdefault(rank, _Sum(0, record.first, record.last, 0)).add(record)

    def compare_before(self, step: int) -> None:
        """Records of a step follow: of a step of the fold that was kept, or of one after it."""
        if self._sums and all(step > each.last for sums in self._sums.values() for each in sums.values()):
            self.compare()

    def compare(self) -> None:
        """All ranks have added their records of the fold."""
        sums, self._sums = self._sums, {}
        for key, by_rank in sorted(sums.items(), key=lambda item: item[0][1:]):
            if len(by_rank) == len(key[0][0]) and len(by_rank) > 1:
                self._compare(key, list(by_rank.values()))

    def _compare(self, key: _Key, sums: Sequence[_Sum]) -> None:
        first = sums[0]
        if self._agreed or all(each == first for each in sums):
            self._add_agreed(key, first)
            return
        if any((each.rows, each.first, each.last) != (first.rows, first.first, first.last) for each in sums):
            # Ranks left out different steps.
            return
        stats = self._stats(key)
        stats.compared += first.rows
        stats.differing += first.rows
        series = self._series(key)
        if series is not None and series.intervals and series.intervals[-1].odd:
            # Whether the same ranks differed at each of these steps is not known.
            last = series.intervals[-1]
            series.intervals[-1] = replace(last, last=first.last, compared=last.compared + first.rows)

    def _add_agreed(self, key: _Key, steps: _Sum) -> None:
        stats = self._stats(key)
        stats.compared += steps.rows
        stats.agreed.setdefault(key[-1], ComparedSteps()).add_range(steps.first, steps.last, steps.rows)
        series = self._series(key)
        if series is not None:
            series.note_folded(steps.first, steps.last, steps.rows)

    def _stats(self, key: _Key) -> ComparisonStats:
        return self._agreement.stats.setdefault(key[:3], ComparisonStats())

    def _series(self, key: _Key) -> AgreementSeries | None:
        if key[1:3] != (Stage.PARAMS.value, TensorKind.PARAMETERS.value):
            return None
        return self._agreement.series.setdefault(key[0], AgreementSeries())


def _is_digest(text: str | None) -> bool:
    try:
        return text is not None and int(text, 16) >= 0
    except ValueError:
        return False


def _stage_of(record: FoldedRecord) -> tuple[str, str, int] | None:
    """Stage, kind of tensors and optimizer of a comparison; None for records that are not compared like digests."""
    if record.of == DigestRecord.kind:
        stage, of, optimizer = (record.by.get(name) for name in ("stage", "of", "optimizer"))
        if type(stage) is str and type(of) is str:
            return stage, of, optimizer if type(optimizer) is int else -1
    elif record.of == AppliedRecord.kind:
        optimizer = record.by.get("optimizer")
        return AppliedRecord.stage, AppliedRecord.of, optimizer if type(optimizer) is int else -1
    return None


def module_of(record: FoldedRecord, modules: dict[int, ModuleKey]) -> ModuleKey | None:
    """The module of the folded records; None where they have none."""
    number = record.by.get("module")
    return modules.get(number) if type(number) is int else None
