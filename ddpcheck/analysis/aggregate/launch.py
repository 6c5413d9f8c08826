"""What is known of one start of a job: fed record by record, bounded however long the job ran."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Agreement
from ddpcheck.analysis.allreduce.verify import AllReduceVerifier
from ddpcheck.analysis.data.collector import DataCollector
from ddpcheck.analysis.hardware.step_times import StepTimes
from ddpcheck.analysis.memory.collector import MemoryCollector
from ddpcheck.analysis.module_key import ModuleKey, module_key
from ddpcheck.analysis.overlap.collector import ProfileCollector
from ddpcheck.analysis.startup.timeline import StartupCollector
from ddpcheck.analysis.timeseries.loss import LossSeries
from ddpcheck.analysis.timing.clock_offsets import ClockOffsets, HostClock
from ddpcheck.analysis.timing.rank_series import StepTimeSeries
from ddpcheck.records.schema import (
    LOOSE,
    AppliedRecord,
    BackwardRecord,
    BatchRecord,
    CaptureRecord,
    ClockRecord,
    CommHookRecord,
    DetailRecord,
    DigestRecord,
    EndRecord,
    EpochRecord,
    FaultRecord,
    HyperRecord,
    JoinRecord,
    LoaderRecord,
    LossRecord,
    MemoryPartsRecord,
    MemoryRecord,
    ModuleRecord,
    NodeMismatchRecord,
    NodesRecord,
    OptimizerRecord,
    RankHeader,
    ReadyRecord,
    Record,
    SkipRecord,
    StackRecord,
    Stage,
    StartupRecord,
    StructureRecord,
    TensorKind,
    TraceRecord,
)

MOST_HYPER_CHANGES = 10_000
# An enum's value takes a while to get, and these are asked for with every record.
_PARAMS, _REWRITTEN = Stage.PARAMS.value, Stage.REWRITTEN.value
# Once one of these is switched off on a rank, no more digests come from it.
_DIGESTING = ("agent", "parameters")
# And from these, no more gradients.
_SKETCHING = ("agent", "backward", "gradients")


@dataclass
class RankData:
    """What one rank wrote."""

    header: RankHeader
    modules: dict[int, ModuleKey] = field(default_factory=dict)
    latest: dict[ModuleKey, ModuleRecord] = field(default_factory=dict)
    as_wrapped: dict[ModuleKey, ModuleRecord] = field(default_factory=dict)
    optimizers: dict[tuple[int, ModuleKey], OptimizerRecord] = field(default_factory=dict)
    hyper: deque[HyperRecord] = field(default_factory=deque)
    # What the oldest changes of `hyper` came to, by optimizer.
    hyper_before: dict[int, dict[str, Any]] = field(default_factory=dict)
    skips: int = 0
    first_skip: SkipRecord | None = None
    structure: list[tuple[ModuleKey, StructureRecord]] = field(default_factory=list)
    # When in a step parameters are written outside the optimizer, as far as that was seen.
    writes: dict[ModuleKey, str] = field(default_factory=dict)
    joined: set[ModuleKey] = field(default_factory=set)
    # Modules whose replicas are meant to differ between averagings.
    loose: set[ModuleKey] = field(default_factory=set)
    comm_hooks: dict[ModuleKey, list[str]] = field(default_factory=dict)
    # The first step at which gradients were applied that are not finite.
    nonfinite: dict[ModuleKey, AppliedRecord] = field(default_factory=dict)
    details: list[tuple[ModuleKey, DetailRecord]] = field(default_factory=list)
    captures: list[tuple[ModuleKey, CaptureRecord]] = field(default_factory=list)
    # Moments at which a rank of another node had other digests.
    apart: list[tuple[ModuleKey, NodeMismatchRecord]] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    end: EndRecord | None = None
    # Steps by module and optimizer; the stage and step of the last record.
    steps: dict[tuple[ModuleKey, int], int] = field(default_factory=dict)
    last: DigestRecord | None = None
    # Where it said it stands, the last time it was asked.
    standing: StackRecord | None = None
    bad_lines: int = 0
    torn: bool = False

    @property
    def counts_steps(self) -> bool:
        """Whether all of this rank's steps are in its records: not once looking or writing was given up."""
        if self.end is None or self.end.dropped:
            return False
        return not any(fault.probe in _DIGESTING for fault in self.faults)

    def hooks(self, module: ModuleKey) -> list[str]:
        """The communication hooks that the user registered."""
        return self.comm_hooks.get(module, [])

    def add_hyper(self, record: HyperRecord) -> None:
        self.hyper.append(record)
        if len(self.hyper) > MOST_HYPER_CHANGES:
            oldest = self.hyper.popleft()
            self.hyper_before.setdefault(oldest.optimizer, {}).update(oldest.changed)

    def hyper_at(self, optimizer: int, step: int) -> dict[str, Any]:
        """The hyperparameters in force at a step."""
        values = dict(self.hyper_before.get(optimizer, {}))
        for record in self.hyper:
            if record.optimizer == optimizer and record.step <= step:
                values.update(record.changed)
        return values


class Attempt:
    """One start of a job."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.ranks: dict[int, RankData] = {}
        self.agreement = Agreement()
        self.gradients = AllReduceVerifier(hashes=self.agreement.hashes)
        self.data = DataCollector()
        self.pace = StepTimes()
        self.clocks: dict[int, StepTimeSeries] = {}
        # By rank and optimizer.
        self.losses: dict[tuple[int, int], LossSeries] = {}
        self.memory = MemoryCollector()
        self.startup = StartupCollector()
        self.window = ProfileCollector()
        self.host_clocks = ClockOffsets()
        # Hosts of ranks that another node's launcher watches, by rank.
        self.elsewhere: dict[int, str] = {}
        # Looks that this folder's ranks have compared with those of other nodes.
        self.compared_across = 0
        self._descriptions: dict[ModuleKey, ModuleRecord] = {}

    @property
    def started(self) -> float:
        return min((rank.header.time for rank in self.ranks.values()), default=0.0)

    @property
    def world_size(self) -> int:
        return max((rank.header.world_size for rank in self.ranks.values()), default=0)

    def hosts(self) -> tuple[HostClock, ...]:
        """The hosts of the job and their clocks, where there are several."""
        here = {number: rank.header.host for number, rank in self.ranks.items()}
        # A device's waits are no moments of the host's clock.
        waits = {rank: clock.shortest_wait() for rank, clock in self.clocks.items() if not clock.device}
        known = {rank: wait for rank, wait in waits.items() if wait is not None}
        return self.host_clocks.hosts(here, self.elsewhere, known)

    def steps(self, rank: int) -> int:
        return max(self.ranks[rank].steps.values(), default=0)

    def modules(self) -> list[ModuleKey]:
        """All modules, in the order in which they were wrapped; this numbers them in reports."""
        order: dict[ModuleKey, tuple[int, ModuleKey]] = {}
        for rank in self.ranks.values():
            for index, key in rank.modules.items():
                order[key] = min(order.get(key, (index, key)), (index, key))
        return sorted(order, key=lambda key: order[key])

    def number(self, module: ModuleKey) -> str:
        return str(self.modules().index(module))

    def of_module(self, module: ModuleKey) -> dict[int, RankData]:
        return {number: rank for number, rank in self.ranks.items() if module in rank.latest}

    def feed(self, header: RankHeader, record: Record) -> None:
        rank = self.ranks.get(header.rank)
        if rank is None:
            rank = self._meet(header)
        # Those of every step first: each pattern that does not fit costs time.
        match record:
            case DigestRecord():
                self._digest(header.rank, rank, record)
            case BackwardRecord() if record.module in rank.modules:
                key = rank.modules[record.module]
                self.gradients.add(header.rank, key, record, rank.latest[key], self.agreement.ended)
                self.pace.reduced(key, record.number)
                self.host_clocks.add(header, key, record)
            case AppliedRecord() if record.module in rank.modules:
                key = rank.modules[record.module]
                self.agreement.add(header.rank, key, record)
                if record.nonfinite:
                    rank.nonfinite.setdefault(key, record)
            case BatchRecord() if record.module in rank.modules:
                self.data.batch(header.rank, rank.modules[record.module], record)
            case MemoryRecord():
                self.memory.step(header.rank, record)
            case ClockRecord():
                if header.rank not in self.clocks:
                    self.clocks[header.rank] = StepTimeSeries.one_of(header.world_size)
                self.clocks[header.rank].add(record)
            case ModuleRecord():
                key = module_key(record.group, record.ordinal)
                record = self._shared(key, record)
                rank.modules[record.module] = key
                rank.latest[key] = record
                rank.as_wrapped.setdefault(key, record)
            case OptimizerRecord() if record.module in rank.modules:
                rank.optimizers[record.optimizer, rank.modules[record.module]] = record
            case HyperRecord() if not self._past_hyper(record):
                rank.add_hyper(record)
            case SkipRecord():
                rank.skips += 1
                rank.first_skip = rank.first_skip or record
            case StructureRecord() if record.module in rank.modules:
                rank.structure.append((rank.modules[record.module], record))
            case JoinRecord() if record.module in rank.modules:
                rank.joined.add(rank.modules[record.module])
                self.gradients.joined.add(rank.modules[record.module])
            case CommHookRecord() if record.module in rank.modules:
                rank.comm_hooks.setdefault(rank.modules[record.module], []).append(record.hook)
                if LOOSE in record.hook:
                    rank.loose.add(rank.modules[record.module])
            case DetailRecord() if record.module in rank.modules:
                rank.details.append((rank.modules[record.module], record))
            case CaptureRecord() if record.module in rank.modules:
                rank.captures.append((rank.modules[record.module], record))
            case LoaderRecord():
                self.data.loader(header.rank, record)
            case EpochRecord() if record.module in rank.modules:
                self.data.epoch(header.rank, rank.modules[record.module], record)
            case MemoryPartsRecord() if record.module in rank.modules:
                self.memory.parts(header.rank, rank.modules[record.module], record)
            case StartupRecord():
                self.startup.add(header.rank, record)
            case StackRecord():
                rank.standing = record
            case LossRecord():
                self.losses.setdefault((header.rank, record.optimizer), LossSeries()).add(record)
            case TraceRecord():
                self.window.trace(header.rank, record)
            case ReadyRecord() if record.module in rank.modules:
                self.window.readiness(header.rank, rank.modules[record.module], record)
            case NodeMismatchRecord() if record.module in rank.modules:
                rank.apart.append((rank.modules[record.module], record))
            case NodesRecord():
                self.elsewhere.update((int(n), host) for n, host in record.others.items() if n.isdecimal())
                self.compared_across += record.compared
            case FaultRecord():
                rank.faults.append(record)
                self._fault(header.rank, record)
            case EndRecord():
                rank.end = record
                self.agreement.end_rank(header.rank)
                self.data.end_rank(header.rank)

    def _shared(self, key: ModuleKey, record: ModuleRecord) -> ModuleRecord:
        """The same object for all ranks that say the same: it names them all, and there may be thousands."""
        known = self._descriptions.setdefault(key, record)
        return known if known == record else record

    def _meet(self, header: RankHeader) -> RankData:
        rank = self.ranks[header.rank] = RankData(header)
        self.agreement.hashes[header.rank] = header.algorithm
        return rank

    def _digest(self, number: int, rank: RankData, record: DigestRecord) -> None:
        key = rank.modules.get(record.module)
        if key is None:
            return
        rank.last = record
        if record.stage == _PARAMS:
            place = (key, -1 if record.optimizer is None else record.optimizer)
            rank.steps[place] = max(rank.steps.get(place, 0), record.step + 1)
            self.pace.step(number, place, record.step, record.time)
        if record.how and record.stage == _REWRITTEN:
            rank.writes.setdefault(key, record.how)
        self.agreement.add(number, key, record)

    def _fault(self, number: int, record: FaultRecord) -> None:
        self.agreement.impaired.add(number)
        if record.probe in _SKETCHING:
            self.gradients.lost.add(number)
        if record.probe in _DIGESTING:
            self.agreement.end_rank(number)

    def end(self) -> None:
        """No more records come at all."""
        self.agreement.end_all()
        self.data.end_all()
        everyone = {number for module, _ in self.modules() for number in module}
        self.gradients.lost |= {n for n in everyone if n not in self.ranks or self.ranks[n].end is None}
        self.gradients.end()

    def _past_hyper(self, record: HyperRecord) -> bool:
        """Whether ranks were known to differ before this change: it must not push out those that tell how."""
        roots = [found.moment for found in self.agreement.hyper.values()]
        steps = [moment.step for moment in roots if moment.optimizer == record.optimizer]
        return bool(steps) and record.step > max(steps)

    def joined(self, module: ModuleKey) -> bool:
        return any(module in rank.joined for rank in self.ranks.values())

    def loose(self, module: ModuleKey) -> bool:
        return any(module in rank.loose for rank in self.ranks.values())

    def parted(self) -> bool:
        """Whether ranks are known to disagree where they must not: what --fail-fast waits for."""
        if any(first_apart(self, module) is not None for module in self.modules()):
            return True
        return any(
            tally.first is not None
            for (module, stage, of), tally in self.agreement.tallies.items()
            if stage not in (Stage.INIT_BEFORE.value, Stage.BUFFERS_END.value)
            and of != TensorKind.IGNORED.value
            and not self.loose(module)
        )


# Where replicas of different nodes must be equal, in the order in which a step comes to them.
_MUST_AGREE = (Stage.INIT_AFTER.value, Stage.BUFFERS.value, Stage.PARAMS.value)


def first_apart(attempt: Attempt, module: ModuleKey) -> tuple[int, NodeMismatchRecord] | None:
    """The first moment at which another node is known to have had other values, and the rank that saw it."""
    if attempt.loose(module):
        return None
    found = [
        (record.step, _MUST_AGREE.index(record.stage), number, record)
        for number, rank in attempt.ranks.items()
        for key, record in rank.apart
        if key == module and record.stage in _MUST_AGREE
    ]
    if not found:
        return None
    _, _, number, record = min(found, key=lambda one: one[:3])
    return number, record
