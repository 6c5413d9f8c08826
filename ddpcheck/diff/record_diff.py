"""What differs between the same moment of two runs, on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.diff.events import DiffEvent
from ddpcheck.diff.model import DiffSource, Value
from ddpcheck.records.digest_codec import unpack_leaves
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.sketch_codec import Packed, unpack


def local_sketches(record: BackwardRecord, names: Sequence[str]) -> dict[str, Packed]:
    """Of the gradients as this rank computed them; none where the record is damaged or was not sketched."""
    return dict(zip(names, _unpacked(record.local), strict=False))


def reduced_sketches(record: BackwardRecord, names: Sequence[str], share: Sequence[int]) -> dict[str, Packed]:
    """Of the reduced gradients, the share that this rank writes down."""
    absent = set(record.absent)
    found = zip(share, _unpacked(record.reduced), strict=False)
    return {names[place]: one for place, one in found if place not in absent}


def same(a: Packed, b: Packed) -> bool:
    """Equal gradients give equal sketches to the bit, and what is not finite is counted."""
    if not a.known or not b.known:
        return a.known == b.known and a.nonfinite == b.nonfinite
    return (a.value, a.norm) == (b.value, b.norm)


def about_norm(one: Packed) -> float:
    """A norm is known between two bounds, not far from each other: the middle of them, in two digits."""
    return float(f"{math.sqrt(one.norm * one.norm_low):.2g}") if one.known else math.nan


def _unpacked(text: str) -> list[Packed]:
    try:
        return unpack(text)
    except ValueError:
        return []


# What causes are told by.
MOVED = "written after the reduction"
SKETCHED = "reduced gradients' sketches"
# Of a digest, for people to compare.
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
    """One stage of a moment: whether the runs differ there, in which tensors, and what each says."""

    where: DiffSource
    differ: bool
    # None: it is not about single tensors, or cannot be told of which.
    names: tuple[str, ...] | None = None
    values: Mapping[str, tuple[Value, ...]] | None = None
    said: tuple[Value, ...] = ()


@dataclass(frozen=True)
class DiffLocation:
    """The rank whose moments are compared."""

    rank: int
    # Sketches of different versions of ddpcheck may have nothing in common.
    sketches: bool = True


def compare(a: DiffEvent, b: DiffEvent, seat: DiffLocation) -> Iterator[RecordDiff]:
    """One outcome for each thing that both moments tell of."""
    one, other = a.record, b.record
    if isinstance(one, DigestRecord) and isinstance(other, DigestRecord):
        yield from _digests(a, b, one, other, seat)
    elif isinstance(one, AppliedRecord) and isinstance(other, AppliedRecord):
        said: tuple[Value, ...] = (_roots(one, other, seat.rank),)
        if one.moved != other.moved:
            said = (*said, Value(MOVED, one.moved, other.moved, seat.rank))
        if seat.sketches and a.backward is not None and b.backward is not None:
            said = (*said, Value(SKETCHED, a.backward.root, b.backward.root, seat.rank))
        yield RecordDiff(DiffSource.APPLIED, one.root != other.root, None, None, said)
    elif isinstance(one, BackwardRecord) and isinstance(other, BackwardRecord):
        if seat.sketches and one.local and other.local:
            yield from _gradients(a, b, one, other, seat)
    elif isinstance(one, BatchRecord) and isinstance(other, BatchRecord):
        yield from _batches(one, other, seat.rank)


def _digests(
    a: DiffEvent, b: DiffEvent, one: DigestRecord, other: DigestRecord, seat: DiffLocation
) -> Iterator[RecordDiff]:
    if one.stage == Stage.PARAMS.value:
        if one.forward is not None and other.forward is not None:
            counts = Value("training forwards so far", one.forward, other.forward, seat.rank)
            yield RecordDiff(DiffSource.FORWARDS, one.forward != other.forward, None, None, (counts,))
        yield RecordDiff(DiffSource.HYPER, *_hyper(a.hyper, b.hyper, seat.rank))
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
            Value("digest", leaves[0][name].hex(), leaves[1][name].hex(), seat.rank),
            *_norms(a, b, name, seat),
        )
        for name in names
    }
    said = (_roots(one, other, seat.rank), *_sets(a.names, b.names))
    yield RecordDiff(where, differ, names or None, values, said)


def _roots(a: DigestRecord | AppliedRecord, b: DigestRecord | AppliedRecord, rank: int) -> Value:
    return Value("digest", a.root[:_DIGITS], b.root[:_DIGITS], rank)


def _sets(a: Sequence[str], b: Sequence[str]) -> tuple[Value, ...]:
    """Buffers that only one version of a model has."""
    only = [", ".join(sorted(set(one) - set(other))) for one, other in ((a, b), (b, a))]
    return (Value("only in this run", only[0], only[1]),) if any(only) else ()


def written(moment: DiffEvent) -> tuple[str, ...] | None:
    """Which parameters were written before a step; None where the step before was not looked at."""
    record, before = moment.record, moment.before
    if not isinstance(record, DigestRecord) or before is None or before.step != record.step - 1:
        return None
    leaves = [unpack_leaves(one.leaves, one.width) for one in (before, record)]
    width = min(before.width, record.width)
    short = [dict(zip(moment.names, (leaf[:width] for leaf in one), strict=False)) for one in leaves]
    return _differing(short[0], short[1]) or None


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, one in a.items() if name in b and one != b[name])


def _norms(a: DiffEvent, b: DiffEvent, name: str, seat: DiffLocation) -> tuple[Value, ...]:
    """How large this rank's own gradient was in that step, where it was sketched."""
    if a.backward is None or b.backward is None or not seat.sketches:
        return ()
    if isinstance(a.record, DigestRecord) and a.record.of == TensorKind.BUFFERS.value:
        return ()
    one = local_sketches(a.backward, a.names).get(name)
    other = local_sketches(b.backward, b.names).get(name)
    if one is None or other is None:
        return ()
    return (Value("gradient norm, about", about_norm(one), about_norm(other), seat.rank),)


def _hyper(
    a: Mapping[str, Any], b: Mapping[str, Any], rank: int
) -> tuple[bool, tuple[str, ...] | None, None, tuple[Value, ...]]:
    """Only what both know: versions of torch add options, with defaults that change nothing."""
    said = tuple(
        Value(name, value, b[name], rank) for name, value in a.items() if name in b and value != b[name]
    )
    return bool(said), None, None, said


def _gradients(
    a: DiffEvent, b: DiffEvent, one: BackwardRecord, other: BackwardRecord, seat: DiffLocation
) -> Iterator[RecordDiff]:
    own = (local_sketches(one, a.names), local_sketches(other, b.names))
    yield _sketches(DiffSource.LOCAL, *own, seat.rank)
    shares = [reduced_sketches(r, m.names, m.shares.get(seat.rank, ())) for m, r in ((a, one), (b, other))]
    found = _sketches(DiffSource.REDUCED, shares[0], shares[1], seat.rank)
    # The other shares are with the other ranks; the root is over all of them.
    differ = found.differ or (one.root != other.root and a.names == b.names)
    yield RecordDiff(DiffSource.REDUCED, differ, found.names, found.values)


def _sketches(where: DiffSource, a: Mapping[str, Packed], b: Mapping[str, Packed], rank: int) -> RecordDiff:
    names = tuple(name for name, one in a.items() if name in b and not same(one, b[name]))
    return RecordDiff(
        where, bool(names), names or None, {name: _pair(a[name], b[name], rank) for name in names}
    )


def _pair(a: Packed, b: Packed, rank: int) -> tuple[Value, ...]:
    values = [
        Value("norm, about", about_norm(a), about_norm(b), rank),
        Value("sketch", a.value, b.value, rank),
    ]
    if a.nonfinite or b.nonfinite:
        values.append(Value("values not finite", a.nonfinite, b.nonfinite, rank))
    return tuple(values)


def _batches(a: BatchRecord, b: BatchRecord, rank: int) -> Iterator[RecordDiff]:
    if a.digest and b.digest:
        said: Sequence[Value] = [Value("batch", a.digest, b.digest, rank)]
        if a.rows != b.rows:
            said = [*said, Value("rows", a.rows, b.rows, rank)]
        yield RecordDiff(DiffSource.DATA, a.digest != b.digest, None, None, tuple(said))
    if a.drew or b.drew:
        said = (Value("generators", a.drew or "nothing drawn", b.drew or "nothing drawn", rank),)
        yield RecordDiff(DiffSource.RANDOM, a.drew != b.drew, None, None, tuple(said))
