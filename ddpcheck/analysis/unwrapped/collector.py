"""Compares parameters and gradients outside of every DDP module, apart from the replicas that DDP keeps equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.agreement import MOST_PENDING, Agreement, PendingValues
from ddpcheck.analysis.aggregate.rank_data import DIGEST_PROBES, ModuleKey, RankData, is_unwrapped
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.records.kinds.modules import ModuleUseRecord
from ddpcheck.records.kinds.rank import FaultRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

_INIT, _PARAMS, _REWRITTEN = Stage.INIT_AFTER.value, Stage.PARAMS.value, Stage.REWRITTEN.value
_USED = Stage.USED.value


class UnwrappedCollector(Collector):
    """Digests of unwrapped modules, and the evidence of how they are connected with the DDP modules."""

    # They contain no unwrapped module.
    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.agreement = Agreement()
        # By module: why DDP did not reduce its backwards, as values of `UnwrappedReason`.
        self.reasons: dict[ModuleKey, set[str]] = {}
        # By module: values of `UseEvidence`.
        self.uses: dict[ModuleKey, set[str]] = {}
        # By module and rank: the first digest, and the last one of parameters.
        self.first: dict[ModuleKey, dict[int, DigestRecord]] = {}
        self.last: dict[ModuleKey, dict[int, DigestRecord]] = {}
        # By module: the last step before which the job itself had made all ranks equal, as by averaging.
        self.equalised: dict[ModuleKey, int] = {}
        # Modules of which the job itself had made some parameters equal, others not, as personal layers are left out.
        self.partly_equalised: set[ModuleKey] = set()
        self._rewrites: PendingValues[tuple[ModuleKey, int, int], DigestRecord] = PendingValues()

    def begin_rank(self, rank: RankData) -> None:
        self.agreement.hashes[rank.number] = rank.header.algorithm

    @collects_per_module(DigestRecord)
    def add_digest(self, rank: RankData, module: ModuleKey, record: DigestRecord) -> None:
        if not is_unwrapped(module):
            return
        self.agreement.add(rank.number, module, record)
        if record.stage in (_REWRITTEN, _USED):
            self._add_rewrite(rank.number, module, record)
        if record.stage == _INIT:
            self.first.setdefault(module, {}).setdefault(rank.number, record)
        if record.stage in (_INIT, _PARAMS):
            self.last.setdefault(module, {})[rank.number] = record

    def _add_rewrite(self, rank: int, module: ModuleKey, record: DigestRecord) -> None:
        # Used after a step, or written before the next one.
        step = record.step + (record.stage == _USED)
        key = (module, step, -1 if record.optimizer is None else record.optimizer)
        if self._rewrites.add(key, module[0], rank, record):
            records = self._rewrites.take(key)
            if len(records) < 2:
                return
            if len({record.root for record in records.values()}) == 1:
                self.equalised[module] = max(step, self.equalised.get(module, -1))
            elif module not in self.partly_equalised and changed_alike(self.first.get(module, {}), records):
                self.partly_equalised.add(module)
        elif len(self._rewrites) > MOST_PENDING:
            self._rewrites.take(self._rewrites.oldest())

    @collects_per_module(AppliedRecord)
    def add_applied(self, rank: RankData, module: ModuleKey, record: AppliedRecord) -> None:
        if is_unwrapped(module):
            self.agreement.add(rank.number, module, record)
            if record.reason:
                self.reasons.setdefault(module, set()).add(record.reason)

    @collects_per_module(ModuleUseRecord)
    def add_use(self, rank: RankData, module: ModuleKey, record: ModuleUseRecord) -> None:
        self.uses.setdefault(module, set()).update(record.evidence)

    @collects(FaultRecord)
    def add_fault(self, rank: RankData, record: FaultRecord) -> None:
        self.agreement.impaired.add(rank.number)
        if record.probe in DIGEST_PROBES:
            self.agreement.end_rank(rank.number)

    def end_rank(self, rank: RankData) -> None:
        self.agreement.end_rank(rank.number)

    def end(self, attempt: Attempt) -> None:
        self.agreement.end_all()


def changed_alike(
    first: Mapping[int, DigestRecord], later: Mapping[int, DigestRecord], equal_before: bool = False
) -> bool:
    """Whether a parameter has changed between the two and is equal on all ranks afterwards."""
    width = min((record.width for record in (*first.values(), *later.values())), default=0)
    before, after = (
        [[leaf[:width] for leaf in unpack_leaves(each.leaves, each.width)] for each in records.values()]
        for records in (first, later)
    )
    if not before or len(before) != len(after) or len({len(leaves) for leaves in (*before, *after)}) != 1:
        return False
    return any(
        len({leaves[index] for leaves in after}) == 1
        and (not equal_before or len({leaves[index] for leaves in before}) == 1)
        and before[0][index] != after[0][index]
        for index in range(len(before[0]))
    )
