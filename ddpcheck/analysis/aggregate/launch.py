"""One launch of a job: distributes the records of its ranks to the collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from ddpcheck.analysis.aggregate.agreement import Agreement
from ddpcheck.analysis.aggregate.collector import AgreementCollector, NodesCollector
from ddpcheck.analysis.aggregate.rank_data import (
    ModuleKey,
    RankData,
    has_no_replica,
    is_sharded_root,
    is_unwrapped,
)
from ddpcheck.analysis.aggregate.registry import Collector, subscriptions
from ddpcheck.analysis.aggregate.step_window import StepBuffer, Window
from ddpcheck.analysis.allreduce.collector import AllReduceVerifier, GradientCollector
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.analysis.data.collector import DataCollector
from ddpcheck.analysis.hardware.collector import StepTimelineCollector, StepTimes
from ddpcheck.analysis.memory.collector import MemoryCollector
from ddpcheck.analysis.step_coverage.collector import StepCoverageCollector
from ddpcheck.analysis.timeseries.collector import LossCollector, LossSeries
from ddpcheck.analysis.timing.collector import (
    ClockOffsetCollector,
    HostClock,
    StepTimeCollector,
    StepTimeSeries,
)
from ddpcheck.records.blocks import Block
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.rank import EndRecord, NodeMismatchRecord, RankHeader
from ddpcheck.records.registry import Record

_AnyCollector = TypeVar("_AnyCollector", bound=Collector)
_Handlers = tuple[list[Callable[..., None]], list[Callable[..., None]]]

# Stages at which replicas of different nodes must be equal, in the order of a step.
_MUST_AGREE = (Stage.INIT_AFTER.value, Stage.BUFFERS.value, Stage.PARAMS.value)
# Stages at which ranks may differ.
_MAY_DIFFER = (Stage.INIT_BEFORE.value, Stage.BUFFERS_END.value)


class Attempt:
    """One launch of a job. What collectors keep is bounded, however long the job runs.

    `collector()` gives access to any collector; the properties are shortcuts to those that many rules use.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        self.ranks: dict[int, RankData] = {}
        self._collectors: dict[type[Collector], Collector] = {}
        for cls in subscriptions():
            self.collector(cls)
        self._handlers = self._subscribe()
        self._window_collectors = [each for each in self._collectors.values() if each.takes_windows]
        self._window_handlers = self._subscribe(windows=True)
        self._buffer = StepBuffer(self)

    def collector(self, cls: type[_AnyCollector]) -> _AnyCollector:
        """The collector of this class."""
        known = self._collectors.get(cls)
        if known is None:
            known = self._collectors[cls] = cls(self)
        return cast("_AnyCollector", known)

    def _subscribe(self, windows: bool = False) -> Mapping[type[Record], _Handlers]:
        """By record class: the methods that take its records, and those that take them with their module.

        `windows`: without the methods of collectors that take windows.
        """
        handlers: dict[type[Record], _Handlers] = {}
        for cls, methods in subscriptions().items():
            if windows and cls.takes_windows:
                continue
            for method, record, per_module in methods:
                handlers.setdefault(record, ([], []))[per_module].append(getattr(self.collector(cls), method))
        return handlers

    def feed(self, header: RankHeader, record: Record) -> None:
        """Add the next record of a rank. `header` identifies the rank."""
        if header.rank not in self.ranks:
            self._add_rank(header)
        self._buffer.add_record(header.rank, record)

    def feed_block(self, header: RankHeader, block: Block) -> None:
        """Add the next block of a rank. Its records wait for those of the other ranks: see `settle`."""
        if header.rank not in self.ranks:
            self._add_rank(header)
        self._buffer.add_block(header.rank, block)

    def compare(self) -> None:
        """Compare what all ranks have written."""
        self._buffer.pass_on()

    def settle(self, seconds: float) -> None:
        """Compare what all ranks have written; pass on everything if some of it has waited for longer."""
        self._buffer.settle(seconds)

    def steps_read(self, rank: int) -> int:
        """Steps of which records were read; those of blocks may not be compared yet."""
        return self._buffer.steps_read(rank) or sum(self.ranks[rank].steps.values())

    def take_window(self, window: Window) -> None:
        for collector in self._window_collectors:
            collector.add_window(window)
        for stream in window.streams:
            handlers = self._window_handlers.get(stream.record)
            if handlers is None:
                continue
            plain, per_module = handlers
            for index, rank in enumerate(stream.ranks):
                for record in stream.records_of(index):
                    for handle in plain:
                        handle(rank, record)
                    for handle in per_module:
                        handle(rank, stream.module, record)

    def take_record(self, rank: RankData, record: Record) -> None:
        handlers = self._handlers.get(type(record))
        if handlers is None:
            return
        plain, per_module = handlers
        for handle in plain:
            handle(rank, record)
        if per_module:
            module = rank.modules.get(record.module)  # type: ignore[attr-defined]
            if module is not None:
                for handle in per_module:
                    handle(rank, module, record)
        if type(record) is EndRecord:
            for collector in self._collectors.values():
                collector.end_rank(rank)

    def _add_rank(self, header: RankHeader) -> RankData:
        rank = self.ranks[header.rank] = RankData(header)
        self._buffer.add_rank(rank)
        for collector in self._collectors.values():
            collector.begin_rank(rank)
        return rank

    def end(self) -> None:
        """All records were read."""
        self._buffer.drain()
        for collector in self._collectors.values():
            collector.end(self)

    @property
    def agreement(self) -> Agreement:
        return self.collector(AgreementCollector).agreement

    @property
    def gradients(self) -> AllReduceVerifier:
        return self.collector(GradientCollector).verifier

    @property
    def data(self) -> DataCollector:
        return self.collector(DataCollector)

    @property
    def memory(self) -> MemoryCollector:
        return self.collector(MemoryCollector)

    @property
    def step_timelines(self) -> StepTimes:
        return self.collector(StepTimelineCollector).step_times

    @property
    def step_times(self) -> dict[int, StepTimeSeries]:
        """Step times by rank."""
        return self.collector(StepTimeCollector).ranks

    @property
    def losses(self) -> dict[tuple[int, int], LossSeries]:
        """By rank and optimizer."""
        return self.collector(LossCollector).series

    @property
    def started(self) -> float:
        return min((rank.header.time for rank in self.ranks.values()), default=0.0)

    @property
    def world_size(self) -> int:
        return max((rank.header.world_size for rank in self.ranks.values()), default=0)

    def hosts(self) -> tuple[HostClock, ...]:
        """The hosts of the job and their clocks, where there are several."""
        here = {number: rank.header.host for number, rank in self.ranks.items()}
        # Waits by the clock of a device are not comparable with the clock of the host.
        waits = {
            rank: series.shortest_wait() for rank, series in self.step_times.items() if not series.device
        }
        known = {rank: wait for rank, wait in waits.items() if wait is not None}
        return self.collector(ClockOffsetCollector).offsets.hosts(here, self.elsewhere, known)

    @property
    def elsewhere(self) -> dict[int, str]:
        """Hosts of ranks that launchers of other nodes monitor, by rank."""
        return self.collector(NodesCollector).hosts

    def steps(self, rank: int) -> int:
        counts = self.ranks[rank].steps
        # Which optimizer took further steps is known only if there is one.
        further = self.collector(CostCollector).steps_beyond_digests(rank) if len(counts) == 1 else 0
        if counts:
            return max(*counts.values(), further)
        # Optimizers of parameters that are not compared.
        return self.collector(StepCoverageCollector).steps(rank)

    def modules(self) -> list[ModuleKey]:
        """All modules in the order of wrapping; their index in this list identifies them in reports.

        In a job without DDP, the parameters of each optimizer that several ranks have.
        """
        order: dict[ModuleKey, tuple[int, ModuleKey]] = {}
        for rank in self.ranks.values():
            for index, key in rank.modules.items():
                order[key] = min(order.get(key, (index, key)), (index, key))
        apart = (is_unwrapped, has_no_replica, is_sharded_root)
        wrapped = [key for key in order if not any(one(key) for one in apart)]
        listed = wrapped or [key for key in order if is_unwrapped(key) and len(self.of_module(key)) > 1]
        return sorted(listed, key=lambda key: order[key])

    def sharded_roots(self) -> list[ModuleKey]:
        """The outermost modules that FSDP shards, of which more than one rank has each."""
        keys = {key for rank in self.ranks.values() for key in rank.latest if is_sharded_root(key)}
        return sorted(key for key in keys if len(self.of_module(key)) > 1)

    def is_replica(self, module: ModuleKey) -> bool:
        """Whether the module has to be equal on all ranks: DDP holds it, or the job reduces its gradients itself."""
        if is_sharded_root(module):
            return False
        return not is_unwrapped(module) or module in self.agreement.reduced_by_job

    def number(self, module: ModuleKey) -> str:
        return str([*self.modules(), *self.sharded_roots()].index(module))

    def of_module(self, module: ModuleKey) -> dict[int, RankData]:
        return {number: rank for number, rank in self.ranks.items() if module in rank.latest}

    def joined(self, module: ModuleKey) -> bool:
        """Whether the module trains inside `join()`."""
        return any(module in rank.joined for rank in self.ranks.values())

    def uses_local_sgd(self, module: ModuleKey) -> bool:
        """Whether replicas of the module differ between averagings on purpose: by torch's hook, or averaged by hand."""
        return any(module in rank.local_sgd for rank in self.ranks.values()) or self.agreement.averaged(
            module
        )

    def diverged(self) -> bool:
        """Whether ranks differ where they must be equal: the condition of --fail-fast."""
        if any(first_node_mismatch(self, module) is not None for module in self.modules()):
            return True
        return any(
            stats.first is not None
            for (module, stage, of), stats in self.agreement.stats.items()
            if stage not in _MAY_DIFFER
            and of != TensorKind.IGNORED.value
            and not self.uses_local_sgd(module)
            and self.is_replica(module)
        )


def first_node_mismatch(attempt: Attempt, module: ModuleKey) -> tuple[int, NodeMismatchRecord] | None:
    """The first stage at which a rank of another node had a different digest, and the rank that recorded it."""
    if attempt.uses_local_sgd(module):
        return None
    mismatches = [
        (record.step, _MUST_AGREE.index(record.stage), number, record)
        for number, rank in attempt.ranks.items()
        for key, record in rank.node_mismatches
        if key == module and record.stage in _MUST_AGREE and _counts(attempt, rank, key, record)
    ]
    if not mismatches:
        return None
    _, _, number, record = min(mismatches, key=lambda mismatch: mismatch[:3])
    return number, record


def _counts(attempt: Attempt, rank: RankData, module: ModuleKey, record: NodeMismatchRecord) -> bool:
    """Whether parameters that differed between nodes after a step still differed where they were used.

    If they were written before the next step, the written values were compared too.
    """
    if record.stage != Stage.PARAMS.value or record.optimizer is None:
        return True
    if record.step + 1 in rank.rewritten.get(module, ()):
        return any(
            (other.stage == Stage.REWRITTEN.value and other.step > record.step)
            or (other.stage == Stage.USED.value and other.step >= record.step)
            for each in attempt.ranks.values()
            for key, other in each.node_mismatches
            if key == module
        )
    return rank.end is not None or rank.steps.get((module, record.optimizer), 0) > record.step + 1
