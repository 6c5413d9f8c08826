"""The records of one rank as events with keys by which another run's events are matched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.codecs import shares
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.modules import HyperRecord, ModuleRecord, OptimizerRecord, SkipRecord
from ddpcheck.records.registry import Record

Comparable = DigestRecord | AppliedRecord | BackwardRecord | BatchRecord | SkipRecord
# Steps whose position is kept for records that are written late.
MAX_POSITIONS = 256
Key = tuple[str | int, ...]


@dataclass(frozen=True)
class DiffEvent:
    """One recorded event; it has the same key in two runs of one job."""

    key: Key
    step: int
    # Number of earlier optimizer steps of any optimizer: orders the events of several modules.
    position: int
    module: int
    record: Comparable
    # Names of the tensors that the record is about.
    names: tuple[str, ...]
    # By rank, which of the reduced gradients it sketches.
    shares: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # The backward of this step, if it was sketched.
    backward: BackwardRecord | None = None
    hyper: Mapping[str, Any] = field(default_factory=dict)
    # The previous parameter digest.
    before: DigestRecord | None = None


class Timeline:
    """Iterates over the records of one rank in the order in which they were written."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = iter(records)
        # By module, the last step that was finished, and its position.
        self.reached: dict[int, tuple[int, int]] = {}
        self.over = False
        self._position = 0
        self._positions: dict[tuple[int, int], int] = {}
        # By module: names of parameters and buffers, and the share of reduced gradients that each rank sketches.
        self._names: dict[tuple[int, bool], tuple[str, ...]] = {}
        self._shares: dict[int, dict[int, tuple[int, ...]]] = {}
        self._backwards: dict[int, BackwardRecord] = {}
        self._params: dict[int, DigestRecord] = {}
        # Never changed in key: events keep them.
        self._hyper: dict[int, dict[str, Any]] = {}

    @property
    def step(self) -> int:
        return max((step for step, _ in self.reached.values()), default=-1)

    def passed(self, event: DiffEvent) -> bool:
        """True if this run is past the position of the event."""
        return self.reached.get(event.module, (-1, 0))[0] > event.step

    def __iter__(self) -> Iterator[DiffEvent]:
        return self

    def __next__(self) -> DiffEvent:
        for record in self._records:
            event = self._handle(record)
            if event is not None:
                return event
        self.over = True
        raise StopIteration

    def _handle(self, record: Record) -> DiffEvent | None:
        match record:
            case ModuleRecord():
                self._describe(record)
            case OptimizerRecord():
                self._change(record.optimizer, {"class": record.name})
            case HyperRecord():
                self._change(record.optimizer, record.changed)
            case DigestRecord() if record.stage != Stage.INIT_BEFORE.value:
                return self._digest(record)
            case BackwardRecord():
                self._backwards[record.module] = record
                return self._event(("backward", record.module, record.number), record.step, record)
            case AppliedRecord():
                key = ("applied", record.module, record.optimizer, record.step)
                return self._event(key, record.step, record)
            case BatchRecord():
                step = record.forward if record.step is None else record.step
                return self._event(("batch", record.module, record.forward), step, record)
            case SkipRecord() if record.module is not None:
                return self._event(("skip", record.module, record.forward), record.step, record)
        return None

    def _describe(self, record: ModuleRecord) -> None:
        self._names[record.module, False] = tuple(str(row[0]) for row in record.parameters)
        self._names[record.module, True] = tuple(str(row[0]) for row in record.buffers)
        self._shares[record.module] = shares(record)

    def _change(self, optimizer: int, changed: Mapping[str, Any]) -> None:
        self._hyper[optimizer] = {**self._hyper.get(optimizer, {}), **changed}

    def _digest(self, record: DigestRecord) -> DiffEvent:
        optimizer = -1 if record.optimizer is None else record.optimizer
        key: Key = (record.stage, record.of, record.module, optimizer, record.step)
        step = record.step
        if record.stage == Stage.BUFFERS.value:
            # Its own number counts synchronizations; the position follows from the order of the records.
            step = self.reached.get(record.module, (-1, 0))[0] + 1
        if record.stage == Stage.STATE.value:
            # Part of the key: a sharded optimizer holds the state of different parameters on each rank.
            key = (*key, record.hyper)
        event = self._event(key, step, record, self._hyper.get(optimizer))
        if record.of == TensorKind.PARAMETERS.value:
            self._params[record.module] = record
        if record.stage == Stage.PARAMS.value:
            self.reached[record.module] = (record.step, self._position)
            self._positions[record.module, record.step] = self._position
            if len(self._positions) > MAX_POSITIONS:
                del self._positions[next(iter(self._positions))]
            self._position += 1
        return event

    def _event(
        self, key: Key, step: int, record: Comparable, hyper: Mapping[str, Any] | None = None
    ) -> DiffEvent:
        module = int(record.module or 0)
        # Batches are recorded after their step, and gradients of a device arrive late.
        position = self._positions.get((module, step), self._position)
        backward = self._backwards.get(module)
        buffers = isinstance(record, DigestRecord) and record.of == TensorKind.BUFFERS.value
        return DiffEvent(
            key=key,
            step=step,
            position=position,
            module=module,
            record=record,
            names=self._names.get((module, buffers), ()),
            shares=self._shares.get(module, {}),
            backward=backward if backward is not None and backward.step == step else None,
            hyper=hyper or {},
            before=self._params.get(module),
        )
