"""The sketches in a backward's record, by name of the parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpcheck.records.schema import BackwardRecord
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
