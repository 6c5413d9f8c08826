"""One rank's records as moments that can be found again in another run, each with its place in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.kinds.optimizers import HyperRecord, OptimizerRecord, SkipRecord
from ddpcheck.records.registry import Record
from ddpcheck.records.sketch_shares import shares

Comparable = DigestRecord | AppliedRecord | BackwardRecord | BatchRecord | SkipRecord
# Steps whose turn is remembered for records that come late.
MOST_TURNS = 256
Key = tuple[str | int, ...]


@dataclass(frozen=True)
class DiffEvent:
    """Something that happened; in two runs of one job it has the same key."""

    key: Key
    step: int
    # How many optimizer steps, of whatever optimizer, came before: orders what several modules do.
    turn: int
    module: int
    record: Comparable
    # Names of the tensors that the record is about.
    names: tuple[str, ...]
    # By rank, which of the reduced gradients it sketches.
    shares: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # Of the step's own backward, where it was sketched.
    backward: BackwardRecord | None = None
    hyper: Mapping[str, Any] = field(default_factory=dict)
    # The parameters as they were looked at before this moment.
    before: DigestRecord | None = None


class Timeline:
    """Goes through the records of one rank in the order in which they were written."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = iter(records)
        # By module, the last step that was finished, and its turn.
        self.reached: dict[int, tuple[int, int]] = {}
        self.over = False
        self._turn = 0
        self._turns: dict[tuple[int, int], int] = {}
        # By module: names of its parameters and of its buffers, and who sketches which of the reduced gradients.
        self._names: dict[tuple[int, bool], tuple[str, ...]] = {}
        self._shares: dict[int, dict[int, tuple[int, ...]]] = {}
        self._backwards: dict[int, BackwardRecord] = {}
        self._params: dict[int, DigestRecord] = {}
        # Never changed in place: moments keep them.
        self._hyper: dict[int, dict[str, Any]] = {}

    @property
    def step(self) -> int:
        return max((step for step, _ in self.reached.values()), default=-1)

    def passed(self, moment: DiffEvent) -> bool:
        """Whether that moment would have been met by now, had it happened here."""
        return self.reached.get(moment.module, (-1, 0))[0] > moment.step

    def __iter__(self) -> Iterator[DiffEvent]:
        return self

    def __next__(self) -> DiffEvent:
        for record in self._records:
            moment = self._take(record)
            if moment is not None:
                return moment
        self.over = True
        raise StopIteration

    def _take(self, record: Record) -> DiffEvent | None:
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
                return self._moment(("backward", record.module, record.number), record.step, record)
            case AppliedRecord():
                key = ("applied", record.module, record.optimizer, record.step)
                return self._moment(key, record.step, record)
            case BatchRecord():
                step = record.forward if record.step is None else record.step
                return self._moment(("batch", record.module, record.forward), step, record)
            case SkipRecord() if record.module is not None:
                return self._moment(("skip", record.module, record.forward), record.step, record)
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
            # Its own number counts synchronisations; both lists are written in the order of events.
            step = self.reached.get(record.module, (-1, 0))[0] + 1
        if record.stage == Stage.STATE.value:
            # Which parameters have a state here: a sharded optimizer holds others on other ranks.
            key = (*key, record.hyper)
        moment = self._moment(key, step, record, self._hyper.get(optimizer))
        if record.of == TensorKind.PARAMETERS.value:
            self._params[record.module] = record
        if record.stage == Stage.PARAMS.value:
            self.reached[record.module] = (record.step, self._turn)
            self._turns[record.module, record.step] = self._turn
            if len(self._turns) > MOST_TURNS:
                del self._turns[next(iter(self._turns))]
            self._turn += 1
        return moment

    def _moment(
        self, key: Key, step: int, record: Comparable, hyper: Mapping[str, Any] | None = None
    ) -> DiffEvent:
        module = int(record.module or 0)
        # A batch is written down after the step that it led to, and gradients come late from a device.
        turn = self._turns.get((module, step), self._turn)
        backward = self._backwards.get(module)
        buffers = isinstance(record, DigestRecord) and record.of == TensorKind.BUFFERS.value
        return DiffEvent(
            key=key,
            step=step,
            turn=turn,
            module=module,
            record=record,
            names=self._names.get((module, buffers), ()),
            shares=self._shares.get(module, {}),
            backward=backward if backward is not None and backward.step == step else None,
            hyper=hyper or {},
            before=self._params.get(module),
        )
