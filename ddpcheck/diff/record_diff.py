"""The records of one rank as events, and differences between the same event of two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.diff.model import DiffSource, Value
from ddpcheck.records.codecs import Packed, shares, unpack, unpack_leaves
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.modules import HyperRecord, ModuleRecord, OptimizerRecord, SkipRecord
from ddpcheck.records.registry import Record

# Values that may differ between healthy runs, and values that are there only where ranks of a run differ.
_NOT_COMPARED = (Stage.INIT_BEFORE.value, Stage.USED.value)

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
            case DigestRecord() if record.stage not in _NOT_COMPARED:
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


# Names of values from which causes are derived.
MOVED = "written after the reduction"
SKETCHED = "reduced gradients' sketches"
# Digits of a digest that reports show.
_DIGITS = 16
_STAGES = {
    Stage.INIT_AFTER.value: DiffSource.INIT,
    Stage.BUFFERS.value: DiffSource.BUFFERS,
    Stage.REWRITTEN.value: DiffSource.REWRITTEN,
    Stage.STATE.value: DiffSource.STATE,
    Stage.PARAMS.value: DiffSource.PARAMS,
}


@dataclass(frozen=True)
class RecordDiff:
    """The result for one stage of an event: whether the runs differ, in which tensors, and both values."""

    where: DiffSource
    differ: bool
    # None: not about single tensors, or unknown.
    names: tuple[str, ...] | None = None
    values: Mapping[str, tuple[Value, ...]] | None = None
    values_without_name: tuple[Value, ...] = ()


@dataclass(frozen=True)
class ComparedRank:
    """The rank whose events are compared."""

    rank: int
    # False if the sketches are of different versions of ddpcheck and cannot be compared.
    sketches: bool = True


def compare(a: DiffEvent, b: DiffEvent, location: ComparedRank) -> Iterator[RecordDiff]:
    """One result for each stage that both events contain."""
    one, other = a.record, b.record
    if isinstance(one, DigestRecord) and isinstance(other, DigestRecord):
        yield from _digests(a, b, one, other, location)
    elif isinstance(one, AppliedRecord) and isinstance(other, AppliedRecord):
        if not one.root or not other.root:
            return  # not digested at this step
        shown: tuple[Value, ...] = (_roots(one, other, location.rank),)
        if one.moved != other.moved:
            shown = (*shown, Value(MOVED, one.moved, other.moved, location.rank))
        if location.sketches and a.backward is not None and b.backward is not None:
            shown = (
                *shown,
                Value(SKETCHED, a.backward.root, b.backward.root, location.rank),
            )
        yield RecordDiff(DiffSource.APPLIED, one.root != other.root, None, None, shown)
    elif isinstance(one, BackwardRecord) and isinstance(other, BackwardRecord):
        if location.sketches and one.local and other.local:
            yield from _gradients(a, b, one, other, location)
    elif isinstance(one, BatchRecord) and isinstance(other, BatchRecord):
        yield from _batches(one, other, location.rank)


def _digests(
    a: DiffEvent, b: DiffEvent, one: DigestRecord, other: DigestRecord, location: ComparedRank
) -> Iterator[RecordDiff]:
    if one.stage == Stage.PARAMS.value:
        if one.forward is not None and other.forward is not None:
            counts = Value("training forwards so far", one.forward, other.forward, location.rank)
            yield RecordDiff(DiffSource.FORWARDS, one.forward != other.forward, None, None, (counts,))
        yield RecordDiff(DiffSource.HYPER, *_hyper(a.hyper, b.hyper, location.rank))
    where = _STAGES.get(one.stage)
    if where is None:
        return
    if one.root == other.root and a.names == b.names:
        yield RecordDiff(where, False)
        return
    leaves = [
        dict(zip(m.names, unpack_leaves(r.leaves, r.width), strict=False)) for m, r in ((a, one), (b, other))
    ]
    names = _differing(leaves[0], leaves[1])
    # The same parameters in another order give another root and the same leaves.
    reordered = a.names != b.names and sorted(a.names) == sorted(b.names)
    differ = bool(names) or not reordered
    values = {
        name: (
            Value("digest", leaves[0][name].hex(), leaves[1][name].hex(), location.rank),
            *_norms(a, b, name, location),
        )
        for name in names
    }
    shown = (_roots(one, other, location.rank), *_sets(a.names, b.names))
    yield RecordDiff(where, differ, names or None, values, shown)


def _roots(a: DigestRecord | AppliedRecord, b: DigestRecord | AppliedRecord, rank: int) -> Value:
    return Value("digest", a.root[:_DIGITS], b.root[:_DIGITS], rank)


def _sets(a: Sequence[str], b: Sequence[str]) -> tuple[Value, ...]:
    """Buffers that only one of the models has."""
    only = [", ".join(sorted(set(one) - set(other))) for one, other in ((a, b), (b, a))]
    return (Value("only in this run", only[0], only[1]),) if any(only) else ()


def written(event: DiffEvent) -> tuple[str, ...] | None:
    """Parameters that were written before a step; None if the previous step was not recorded."""
    record, before = event.record, event.before
    if not isinstance(record, DigestRecord) or before is None or before.step != record.step - 1:
        return None
    leaves = [unpack_leaves(one.leaves, one.width) for one in (before, record)]
    width = min(before.width, record.width)
    short = [dict(zip(event.names, (leaf[:width] for leaf in one), strict=False)) for one in leaves]
    return _differing(short[0], short[1]) or None


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, one in a.items() if name in b and one != b[name])


def _norms(a: DiffEvent, b: DiffEvent, name: str, location: ComparedRank) -> tuple[Value, ...]:
    """The norm of this rank's local gradient in that step, if it was sketched."""
    if a.backward is None or b.backward is None or not location.sketches:
        return ()
    if isinstance(a.record, DigestRecord) and a.record.of == TensorKind.BUFFERS.value:
        return ()
    one = local_sketches(a.backward, a.names).get(name)
    other = local_sketches(b.backward, b.names).get(name)
    if one is None or other is None:
        return ()
    return (Value("gradient norm, about", approximate_norm(one), approximate_norm(other), location.rank),)


def _hyper(
    a: Mapping[str, Any], b: Mapping[str, Any], rank: int
) -> tuple[bool, tuple[str, ...] | None, None, tuple[Value, ...]]:
    """Compare options that both runs have: newer versions of torch add options with neutral defaults."""
    shown = tuple(
        Value(name, value, b[name], rank) for name, value in a.items() if name in b and value != b[name]
    )
    return bool(shown), None, None, shown


def _gradients(
    a: DiffEvent, b: DiffEvent, one: BackwardRecord, other: BackwardRecord, location: ComparedRank
) -> Iterator[RecordDiff]:
    own = (local_sketches(one, a.names), local_sketches(other, b.names))
    yield _sketches(DiffSource.LOCAL, *own, location.rank)
    shares = [
        reduced_sketches(r, m.names, m.shares.get(location.rank, ())) for m, r in ((a, one), (b, other))
    ]
    sketches = _sketches(DiffSource.REDUCED, shares[0], shares[1], location.rank)
    # Other ranks sketch the other shares; the root covers all of them.
    differ = sketches.differ or (one.root != other.root and a.names == b.names)
    yield RecordDiff(DiffSource.REDUCED, differ, sketches.names, sketches.values)


def _sketches(where: DiffSource, a: Mapping[str, Packed], b: Mapping[str, Packed], rank: int) -> RecordDiff:
    names = tuple(name for name, one in a.items() if name in b and not same(one, b[name]))
    return RecordDiff(
        where, bool(names), names or None, {name: _pair(a[name], b[name], rank) for name in names}
    )


def _pair(a: Packed, b: Packed, rank: int) -> tuple[Value, ...]:
    values = [
        Value("norm, about", approximate_norm(a), approximate_norm(b), rank),
        Value("sketch", a.value, b.value, rank),
    ]
    if a.nonfinite or b.nonfinite:
        values.append(Value("values not finite", a.nonfinite, b.nonfinite, rank))
    return tuple(values)


def _batches(a: BatchRecord, b: BatchRecord, rank: int) -> Iterator[RecordDiff]:
    if a.digest and b.digest:
        shown: Sequence[Value] = [Value("batch", a.digest, b.digest, rank)]
        if a.rows != b.rows:
            shown = [*shown, Value("rows", a.rows, b.rows, rank)]
        yield RecordDiff(DiffSource.DATA, a.digest != b.digest, None, None, tuple(shown))
    if a.drew or b.drew:
        shown = (Value("generators", a.drew or "nothing drawn", b.drew or "nothing drawn", rank),)
        yield RecordDiff(DiffSource.RANDOM, a.drew != b.drew, None, None, tuple(shown))


def local_sketches(record: BackwardRecord, names: Sequence[str]) -> dict[str, Packed]:
    """Sketches of the local gradients; empty if the record is damaged or was not sketched."""
    return dict(zip(names, _unpacked(record.local), strict=False))


def reduced_sketches(record: BackwardRecord, names: Sequence[str], share: Sequence[int]) -> dict[str, Packed]:
    """Sketches of the reduced gradients in this rank's share."""
    absent = set(record.absent)
    sketches = zip(share, _unpacked(record.reduced), strict=False)
    return {names[key]: one for key, one in sketches if key not in absent}


def same(a: Packed, b: Packed) -> bool:
    """Equal gradients give bitwise equal sketches; non-finite values are counted."""
    if not a.known or not b.known:
        return a.known == b.known and a.nonfinite == b.nonfinite
    return (a.value, a.norm) == (b.value, b.norm)


def approximate_norm(one: Packed) -> float:
    """The geometric mean of the bounds of a norm, to two digits."""
    return float(f"{math.sqrt(one.norm * one.norm_low):.2g}") if one.known else math.nan


def _unpacked(text: str | bytes) -> list[Packed]:
    try:
        return unpack(text)
    except ValueError:
        return []
