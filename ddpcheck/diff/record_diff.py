"""Differences between the same event of two runs, on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.diff.events import DiffEvent
from ddpcheck.diff.model import DiffSource, Value
from ddpcheck.records.codecs import Packed, unpack, unpack_leaves
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord

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


def _unpacked(text: str) -> list[Packed]:
    try:
        return unpack(text)
    except ValueError:
        return []
