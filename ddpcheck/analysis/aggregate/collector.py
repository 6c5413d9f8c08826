"""Collectors of what all rules share: data of each rank, comparisons between ranks, and the hosts of other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ddpcheck.analysis.aggregate.agreed_window import add_window
from ddpcheck.analysis.aggregate.agreement import Agreement
from ddpcheck.analysis.aggregate.compared_steps import ComparedSteps
from ddpcheck.analysis.aggregate.rank_data import (
    DIGEST_PROBES,
    ModuleKey,
    RankData,
    is_sharded_root,
    is_unwrapped,
    module_key,
)
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.records.kinds.modules import (
    LOCAL_SGD_HOOK,
    CommHookRecord,
    HyperRecord,
    JoinRecord,
    ModuleRecord,
    OptimizerRecord,
    SkipRecord,
    StructureRecord,
)
from ddpcheck.records.kinds.rank import (
    DeviceRecord,
    EndRecord,
    FaultRecord,
    NodeMismatchRecord,
    NodesRecord,
    StackRecord,
)

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.step_window import Window

# Reading an enum's value is slow, and these are needed for every record.
# Descriptions that are kept of each module: records of a backward may follow a few changes later.
_MOST_REVISIONS = 8
_PARAMETERS = TensorKind.PARAMETERS.value
# How the backward before a step ended: DDP did not reduce it.
_UNSYNCED = "unsynced"
_PARAMS, _REWRITTEN, _USED = Stage.PARAMS.value, Stage.REWRITTEN.value, Stage.USED.value


class AgreementCollector(Collector):
    """Compares digests of all ranks. What a job with DDP modules trains outside of them has its own collector."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.agreement = Agreement()

    def add_window(self, window: Window) -> None:
        add_window(self.agreement, window)

    def begin_rank(self, rank: RankData) -> None:
        self.agreement.hashes[rank.number] = rank.header.algorithm

    @collects_per_module(DigestRecord)
    def add_digest(self, rank: RankData, module: ModuleKey, record: DigestRecord) -> None:
        if not (is_unwrapped(module) and rank.wraps):
            self.agreement.add(rank.number, module, record)

    @collects_per_module(AppliedRecord)
    def add_applied(self, rank: RankData, module: ModuleKey, record: AppliedRecord) -> None:
        if not (is_unwrapped(module) and rank.wraps):
            self.agreement.add(rank.number, module, record)

    @collects_per_module(DeviceRecord)
    def add_device(self, rank: RankData, module: ModuleKey, record: DeviceRecord) -> None:
        self.agreement.unsampled.add(module)

    @collects(FaultRecord)
    def add_fault(self, rank: RankData, record: FaultRecord) -> None:
        self.agreement.impaired.add(rank.number)
        if record.probe in DIGEST_PROBES:
            self.agreement.end_rank(rank.number)

    def end_rank(self, rank: RankData) -> None:
        self.agreement.end_rank(rank.number)

    def end(self, attempt: Attempt) -> None:
        self.agreement.end_all()


class RankCollector(Collector):
    """Fills the `RankData` of each rank."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self._agreement = attempt.agreement
        self._descriptions: dict[ModuleKey, ModuleRecord] = {}

    def add_window(self, window: Window) -> None:
        """Of each rank, only the last digest counts, and the forwards before its first step."""
        digests = sorted(window.of(DigestRecord), key=lambda stream: stream.constants["stage"] == _PARAMS)
        for stream in digests:
            optimizer = stream.constants["optimizer"]
            key = (stream.module, -1 if optimizer is None else optimizer)
            for index, rank in enumerate(stream.ranks):
                if stream.constants["stage"] == _PARAMS and key not in rank.first_steps:
                    self.add_digest(rank, stream.module, cast("DigestRecord", stream.record_at(index, 0)))
                self.add_digest(rank, stream.module, cast("DigestRecord", stream.last_of(index)))

    @collects_per_module(DigestRecord)
    def add_digest(self, rank: RankData, module: ModuleKey, record: DigestRecord) -> None:
        if record.of == _PARAMETERS:
            rank.final[module] = record.root
        if record.stage == _USED:
            if record.how:
                rank.rewritten.setdefault(module, ComparedSteps()).add(record.step + 1)
            return
        if (is_unwrapped(module) and rank.wraps) or is_sharded_root(module):
            return
        rank.last = record
        if record.stage == _PARAMS:
            key = (module, -1 if record.optimizer is None else record.optimizer)
            rank.steps[key] = max(rank.steps.get(key, 0), record.step + 1)
            if key not in rank.first_steps:
                rank.first_steps[key] = record.forward or 0
        elif record.stage == _REWRITTEN:
            rank.rewritten.setdefault(module, ComparedSteps()).add(record.step)
            if record.how:
                rank.writes.setdefault(module, record.how)

    @collects_per_module(AppliedRecord)
    def add_applied(self, rank: RankData, module: ModuleKey, record: AppliedRecord) -> None:
        if record.last == _UNSYNCED and module not in rank.first_unreduced:
            rank.first_unreduced[module] = record
        if record.nonfinite:
            rank.nonfinite.setdefault(module, record)

    @collects(ModuleRecord)
    def add_module(self, rank: RankData, record: ModuleRecord) -> None:
        key = module_key(record.group, record.ordinal)
        # One object for all ranks with equal descriptions: it contains all parameter names, and ranks may be thousands.
        known = self._descriptions.setdefault(key, record)
        shared = known if known == record else record
        # Another index: the first call of DDP raised, and the second has its number in the group.
        wrapped_again = record.module not in rank.modules and key in rank.latest
        rank.modules[record.module] = key
        rank.latest[key] = shared
        if wrapped_again or key not in rank.as_wrapped:
            rank.as_wrapped[key] = shared
        elif key not in rank.first_revision:
            rank.first_revision[key] = rank.last.step + 1 if rank.last is not None else 0
        revisions = rank.revisions.setdefault(key, {})
        revisions[record.revision] = shared
        if len(revisions) > _MOST_REVISIONS:
            del revisions[min(revisions)]

    @collects_per_module(OptimizerRecord)
    def add_optimizer(self, rank: RankData, module: ModuleKey, record: OptimizerRecord) -> None:
        rank.optimizers[record.optimizer, module] = record

    @collects(HyperRecord)
    def add_hyper(self, rank: RankData, record: HyperRecord) -> None:
        if not self._is_after_disagreement(record):
            rank.add_hyper(record)

    def _is_after_disagreement(self, record: HyperRecord) -> bool:
        """Whether ranks differed before this change: later changes must not displace those that explain it."""
        keys = [disagreement.key for disagreement in self._agreement.hyper.values()]
        steps = [key.step for key in keys if key.optimizer == record.optimizer]
        return bool(steps) and record.step > max(steps)

    @collects(SkipRecord)
    def add_skip(self, rank: RankData, record: SkipRecord) -> None:
        rank.skips += 1
        rank.first_skip = rank.first_skip or record

    @collects_per_module(StructureRecord)
    def add_structure(self, rank: RankData, module: ModuleKey, record: StructureRecord) -> None:
        rank.structure.append((module, record))

    @collects_per_module(JoinRecord)
    def add_join(self, rank: RankData, module: ModuleKey, record: JoinRecord) -> None:
        rank.joined.add(module)

    @collects_per_module(CommHookRecord)
    def add_comm_hook(self, rank: RankData, module: ModuleKey, record: CommHookRecord) -> None:
        rank.comm_hooks.setdefault(module, []).append(record.hook)
        if LOCAL_SGD_HOOK in record.hook:
            rank.local_sgd.add(module)

    @collects_per_module(DetailRecord)
    def add_detail(self, rank: RankData, module: ModuleKey, record: DetailRecord) -> None:
        rank.details.append((module, record))

    @collects_per_module(CaptureRecord)
    def add_capture(self, rank: RankData, module: ModuleKey, record: CaptureRecord) -> None:
        rank.captures.append((module, record))

    @collects_per_module(NodeMismatchRecord)
    def add_node_mismatch(self, rank: RankData, module: ModuleKey, record: NodeMismatchRecord) -> None:
        rank.node_mismatches.append((module, record))

    @collects(StackRecord)
    def add_stack(self, rank: RankData, record: StackRecord) -> None:
        rank.stack = record

    @collects(FaultRecord)
    def add_fault(self, rank: RankData, record: FaultRecord) -> None:
        rank.faults.append(record)

    @collects(EndRecord)
    def add_end(self, rank: RankData, record: EndRecord) -> None:
        rank.end = record


class NodesCollector(Collector):
    """Ranks that launchers of other nodes monitor."""

    def __init__(self, attempt: Attempt) -> None:
        # Their hosts by rank.
        self.hosts: dict[int, str] = {}
        # Number of digests that were compared with those of other nodes.
        self.compared = 0

    @collects(NodesRecord)
    def add(self, rank: RankData, record: NodesRecord) -> None:
        self.hosts.update((int(other), host) for other, host in record.others.items() if other.isdecimal())
        self.compared += record.compared
