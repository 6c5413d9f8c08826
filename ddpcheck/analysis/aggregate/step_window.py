"""Collects the blocks of all ranks until they cover the same steps, and passes these steps to the collectors at once.

Nearly all steps of nearly all jobs are regular: every rank writes the same kinds of records, without any event in
between. Records of such steps are never made. Steps at which a rank wrote anything else, such as an event or a record
of a rare kind, are passed record by record, in the order in which each rank wrote them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData, is_unwrapped
from ddpcheck.analysis.aggregate.step_columns import Rows, Stream, integers
from ddpcheck.records.blocks import Block, RecordTable
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.folds import FoldedRecord
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.rank import EndRecord
from ddpcheck.records.registry import Record, block_table, field_defaults, record_kinds
from ddpcheck.records.summaries import step_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpcheck.analysis.aggregate.launch import Attempt

# Fields that may differ between the rows of a table of a regular step.
_COLUMNS: Mapping[type[Record], frozenset[str]] = {
    DigestRecord: frozenset({"step", "root", "leaves", "time", "forward", "hyper"}),
    AppliedRecord: frozenset({"step", "root"}),
    BackwardRecord: frozenset({"number", "step", "local", "reduced", "root", "time"}),
    BatchRecord: frozenset({"forward", "step", "digest", "variety", "rows", "tokens", "attended"}),
}
# Fields that have their default in a regular step.
_DEFAULTS: Mapping[type[Record], tuple[str, ...]] = {
    DigestRecord: ("how",),
    AppliedRecord: ("last", "moved", "reason", "waiting", "nonfinite"),
    BackwardRecord: ("local_nonfinite", "reduced_nonfinite", "absent", "divisor"),
    BatchRecord: ("drew", "drew_before", "parts"),
}
# Collectors receive them in this order.
REGULAR_KINDS = (BackwardRecord, AppliedRecord, DigestRecord, BatchRecord)
_REGULAR_DIGESTS = (
    (Stage.PARAMS.value, TensorKind.PARAMETERS.value),
    (Stage.BUFFERS.value, TensorKind.BUFFERS.value),
)
# Records that wait for other ranks, of all ranks together, before some are passed on one by one: a rank may be gone.
_MOST_WAITING = 1 << 20
# Events among them, which are objects. Of folded steps there are only events.
_MOST_EVENTS = 1 << 16
# Steps of a window, and of all ranks together. Arrays of all ranks are made of it.
_MOST_STEPS, _FEWEST_STEPS = 256, 16
_STEPS_OF_ALL = 1 << 16
# A smaller share of the rows of a block is decoded row by row.
_FEW_ROWS = 4
_Key = tuple[Any, ...]


@dataclass
class _BlockRows:
    """A block of one rank, of which the first steps may have been passed on."""

    block: Block
    # By row of the block: the step that the rank was at.
    steps: NDArray[np.int64]
    # Which rows wait, as opposed to those of one rank alone.
    waits: NDArray[np.bool_]
    # By stream: the table, and the step of each of its rows.
    tables: dict[_Key, tuple[RecordTable, NDArray[np.int64]]]
    # Rows before this step were passed on.
    since: int
    # When it was read.
    arrived: float
    _records: list[Record] | None = None

    @property
    def last(self) -> int:
        return int(self.steps[-1])

    def first(self) -> int:
        return max(self.since, int(self.steps[0]))

    def records(self, until: int) -> Iterator[Record]:
        """Those that wait, up to a step."""
        begin, end = self.steps.searchsorted(self.since), self.steps.searchsorted(until, "right")
        rows = [index for index in range(int(begin), int(end)) if self.waits[index]]
        if self._records is None and len(rows) * _FEW_ROWS < len(self.steps):
            order = self.block.order
            for index in rows:
                table = self.block.tables[order[index]]
                if table is not None:
                    yield table.record_at(order.count(order[index], 0, index))
            return
        if self._records is None:
            self._records = list(self.block.records())
        yield from (self._records[index] for index in rows)


@dataclass
class _Event:
    """A record that is passed on after the rows before it."""

    record: Record
    step: int


@dataclass
class _RankQueue:
    rank: RankData
    entries: deque[_BlockRows | _Event] = field(default_factory=deque)
    rows: int = 0
    # The last step of the blocks, and of all records once there were folded steps.
    step: int = -1
    folded: bool = False

    def complete(self) -> int:
        """All records of the steps before this one were read."""
        entry = self.entries[-1]
        return self.step + (isinstance(entry, _Event) and isinstance(entry.record, EndRecord))

    def head(self) -> int:
        """The step of the oldest entry."""
        entry = self.entries[0]
        return entry.step if isinstance(entry, _Event) else entry.first()


class Window:
    """Regular steps of all ranks."""

    def __init__(self, first: int, end: int, streams: Sequence[Stream]) -> None:
        self.first, self.end, self.streams = first, end, streams

    def of(self, record: type[Record]) -> list[Stream]:
        return [stream for stream in self.streams if stream.record is record]


class StepBuffer:
    """Rows of all ranks that have not been passed on yet."""

    def __init__(self, attempt: Attempt) -> None:
        # A cycle would delay freeing the memory of the attempt.
        self._attempt = ref(attempt)
        self._queues: dict[int, _RankQueue] = {}
        # Steps that are passed on record by record.
        self._single: set[int] = set()
        self._waiting = 0
        self._events = 0

    def _feed(self, rank: RankData, record: Record) -> None:
        attempt = self._attempt()
        if attempt is not None:
            attempt.take_record(rank, record)

    def _feed_window(self, window: Window) -> None:
        attempt = self._attempt()
        if attempt is not None:
            attempt.take_window(window)

    def add_rank(self, rank: RankData) -> None:
        self._queues[rank.number] = _RankQueue(rank)

    def steps_read(self, rank: int) -> int:
        """Steps of which records were read, whether or not they were passed on."""
        queue = self._queues.get(rank)
        return 0 if queue is None else queue.step + 1

    def add_record(self, rank: int, record: Record) -> None:
        queue = self._queues[rank]
        if isinstance(record, FoldedRecord):
            # Passed on in the order of steps, like the records that it replaces.
            queue.step = max(queue.step, record.part)
            queue.folded = True
        elif not queue.entries:
            self._feed(queue.rank, record)
            return
        elif queue.folded:
            # Elsewhere a record after a block does not wait for one of a later step: ranks that have diverged may be
            # held, and write no more.
            queue.step = max(queue.step, _compared_step(record))
        queue.entries.append(_Event(record, queue.step))
        self._single.add(queue.step)
        self._events += 1
        if self._events > _MOST_EVENTS:
            self.pass_on()
        while self._events > _MOST_EVENTS:
            self._pass_singly(min(q.head() for q in self._queues.values() if q.entries) + _MOST_STEPS)

    def add_block(self, rank: int, block: Block) -> None:
        queue = self._queues[rank]
        entry = self._entry(queue, block)
        if entry is None:
            return
        queue.entries.append(entry)
        queue.rows += block.rows
        self._waiting += block.rows
        if self._waiting > _MOST_WAITING:
            self.pass_on()
        while self._waiting > _MOST_WAITING:
            # Some rank has ended, or writes nothing.
            self._pass_singly(min(q.head() for q in self._queues.values() if q.entries) + _MOST_STEPS)

    def _entry(self, queue: _RankQueue, block: Block) -> _BlockRows | None:
        """None for a block that holds only records of one rank alone."""
        order = np.frombuffer(block.order, np.uint8)
        steps = np.full(len(order), -1, np.int64)
        waits = np.zeros(len(order), bool)
        tables: dict[_Key, tuple[RecordTable, NDArray[np.int64]]] = {}
        irregular: list[int] = []
        for index, table in enumerate(block.tables):
            if table is None:
                continue
            declared = block_table(table.record)
            if declared is not None and declared.of_one_rank:
                for record in table.records():
                    self._feed(queue.rank, record)
                continue
            rows = order == index
            waits |= rows
            steps[rows] = _steps_of(table)
            key = _regular_key(table, queue.rank)
            if key is None or key in tables:
                irregular.append(index)
            else:
                tables[key] = (table, steps[:0])
        if not waits.any():
            return None
        # Where rows count something else than steps, they belong to the step of the row before.
        own = steps.copy()
        steps[0] = max(int(steps[0]), queue.step)
        steps = np.maximum.accumulate(steps)
        # A count that was restarted, or gradients of a device that arrive late.
        late = (own >= 0) & (own < steps)
        if late.any():
            self._single.update(map(int, np.unique(steps[late])))
        queue.step = int(steps[-1])
        for index in irregular:
            self._single.update(map(int, np.unique(steps[order == index])))
        for key, (table, _) in tables.items():
            tables[key] = (table, steps[order == block.tables.index(table)])
        return _BlockRows(block, steps, waits, tables, int(steps[0]), time.monotonic())

    def pass_on(self) -> None:
        """Pass on what all ranks have written."""
        while True:
            queues = list(self._queues.values())
            if not queues or len(queues) < queues[0].rank.header.world_size:
                break
            if not all(queue.entries for queue in queues):
                break
            first, end = min(queue.head() for queue in queues), min(queue.complete() for queue in queues)
            if end <= first:
                break
            end = min(end, first + max(_FEWEST_STEPS, min(_MOST_STEPS, _STEPS_OF_ALL // len(queues))))
            single = [step for step in self._single if step < end]
            if single and min(single) <= first:
                self._single.difference_update(step for step in single if step <= first)
                self._pass_singly(first)
                continue
            end = min([end, *single])
            window = self._window(queues, first, end)
            if window is None:
                self._pass_singly(end - 1)
                continue
            self._feed_window(window)
            self._advance(queues, end)

    def settle(self, seconds: float) -> None:
        """Pass on everything if some of it has waited for longer than `seconds`."""
        self.pass_on()
        oldest = min((entry.arrived for entry in self._oldest_blocks()), default=math.inf)
        if time.monotonic() - oldest >= seconds:
            self.drain()

    def _oldest_blocks(self) -> Iterator[_BlockRows]:
        for queue in self._queues.values():
            for entry in queue.entries:
                if isinstance(entry, _BlockRows):
                    yield entry
                    break

    def drain(self) -> None:
        """Pass on everything."""
        self.pass_on()
        self._pass_singly(max((queue.step for queue in self._queues.values()), default=-1))
        self._single.clear()

    def _pass_singly(self, until: int) -> None:
        """Record by record, up to a step; in small steps, so that no rank gets far ahead."""
        while True:
            heads = [queue.head() for queue in self._queues.values() if queue.entries]
            if not heads or min(heads) > until:
                return
            step = min(heads)
            for queue in self._queues.values():
                self._pass_step(queue, step)

    def _pass_step(self, queue: _RankQueue, step: int) -> None:
        while queue.entries:
            entry = queue.entries[0]
            if isinstance(entry, _Event):
                if entry.step > step:
                    return
                queue.entries.popleft()
                self._events -= 1
                self._feed(queue.rank, entry.record)
                continue
            if entry.first() > step:
                return
            for record in entry.records(step):
                self._feed(queue.rank, record)
            if not self._advance_entry(queue, entry, step + 1):
                return

    def _advance(self, queues: Sequence[_RankQueue], end: int) -> None:
        for queue in queues:
            while queue.entries:
                entry = queue.entries[0]
                if isinstance(entry, _Event) or not self._advance_entry(queue, entry, end):
                    break

    def _advance_entry(self, queue: _RankQueue, entry: _BlockRows, end: int) -> bool:
        """The rows before this step were passed on. Whether the block has no more."""
        if entry.last >= end:
            entry.since = end
            return False
        queue.entries.popleft()
        queue.rows -= entry.block.rows
        self._waiting -= entry.block.rows
        return True

    def _window(self, queues: Sequence[_RankQueue], first: int, end: int) -> Window | None:
        """None where the ranks did not write the same."""
        by_rank = [_rows_between(queue, first, end) for queue in queues]
        keys = by_rank[0].keys()
        if not keys or any(rows.keys() != keys for rows in by_rank):
            return None
        streams = []
        for key in keys:
            parts = [rows[key] for rows in by_rank]
            steps = [_joined_steps(of_rank) for of_rank in parts]
            if any(not np.array_equal(steps[0], other) for other in steps[1:]):
                return None
            rows_of = [[rows for rows, _ in of_rank] for of_rank in parts]
            record, module = key[0], key[1]
            if len(module[0]) != len(queues):
                return None
            table = rows_of[0][0].table
            streams.append(
                Stream(record, module, table.constants, [q.rank for q in queues], rows_of, steps[0])
            )
        streams.sort(key=lambda stream: REGULAR_KINDS.index(stream.record))
        return Window(first, end, streams)


def _compared_step(record: Record) -> int:
    """The step of a record that is compared across ranks; -1 for others."""
    declared = block_table(type(record))
    step = None if declared is None or declared.of_one_rank else step_of(record)
    return -1 if step is None else step


def _joined_steps(parts: Sequence[tuple[Rows, NDArray[np.int64]]]) -> NDArray[np.int64]:
    return parts[0][1] if len(parts) == 1 else np.concatenate([steps for _, steps in parts])


def _rows_between(
    queue: _RankQueue, first: int, end: int
) -> dict[_Key, list[tuple[Rows, NDArray[np.int64]]]]:
    by_key: dict[_Key, list[tuple[Rows, NDArray[np.int64]]]] = {}
    for entry in queue.entries:
        if isinstance(entry, _Event):
            # Steps with an event are no part of a window.
            continue
        if entry.first() >= end:
            break
        for key, (table, steps) in entry.tables.items():
            begin, stop = steps.searchsorted((max(first, entry.since), end))
            if begin < stop:
                by_key.setdefault(key, []).append((Rows(table, int(begin), int(stop)), steps[begin:stop]))
    return by_key


def _steps_of(table: RecordTable) -> NDArray[np.int64]:
    """-1 where rows count something else."""
    if table.record is DigestRecord and table.constants.get("stage") in (
        Stage.BUFFERS.value,
        Stage.BUFFERS_END.value,
    ):
        return np.full(table.rows, -1, np.int64)
    if table.record is BatchRecord and "step" not in table.columns and table.constants["step"] is None:
        return integers(table, "forward")
    try:
        return integers(table, "step")
    except (KeyError, TypeError, ValueError, OverflowError):
        return np.full(table.rows, -1, np.int64)


@cache
def _expected(kind: str) -> list[tuple[str, Any]]:
    cls = record_kinds()[kind]
    return [(name, default) for name, default in field_defaults(cls) if name in _DEFAULTS[cls]]


def _regular_key(table: RecordTable, rank: RankData) -> _Key | None:
    """What identifies the stream of a table across ranks; None for records that are passed on one by one."""
    columns = _COLUMNS.get(table.record)
    if columns is None or not table.columns.keys() <= columns:
        return None
    constants = table.constants
    if any(constants[name] != default for name, default in _expected(table.record.kind)):
        return None
    module: ModuleKey | None = rank.modules.get(constants["module"])
    if module is None or is_unwrapped(module) or rank.number not in module[0]:
        return None
    if table.record is DigestRecord:
        if (constants["stage"], constants["of"]) not in _REGULAR_DIGESTS:
            return None
        return (
            DigestRecord,
            module,
            constants["stage"],
            constants["of"],
            constants["optimizer"],
            constants["width"],
        )
    if table.record is AppliedRecord:
        if "root" not in table.columns and not constants["root"]:
            return None
        return (AppliedRecord, module, constants["optimizer"], constants["synced"], constants["unsynced"])
    if table.record is BackwardRecord:
        sketched = "local" in table.columns or bool(constants["local"])
        return (BackwardRecord, module, constants["revision"], sketched)
    return (BatchRecord, module)
