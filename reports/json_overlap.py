"""The key `overlap` of report.json, read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddpcheck.analysis.overlap.model import (
    BucketAdvice,
    BucketLayout,
    BucketOverlap,
    BucketPart,
    Overlap,
    RankOverlap,
    RankStepOverlap,
    StepOverlap,
)


def overlap_from(raw: Mapping[str, Any] | None) -> Overlap | None:
    """The profiled steps behind `raw`; keys that this version does not know are left out."""
    if raw is None:
        return None
    known = _known(Overlap, raw)
    known["ranks"] = tuple(_rank(item) for item in raw["ranks"])
    known["steps"] = tuple(StepOverlap(**_known(StepOverlap, item)) for item in raw["steps"])
    known["buckets"] = tuple(_bucket(item) for item in raw["buckets"])
    known["advice"] = _advice(raw.get("advice"))
    known["left_out"] = tuple(raw.get("left_out", ()))
    return Overlap(**known)


def _rank(raw: Mapping[str, Any]) -> RankOverlap:
    known = _known(RankOverlap, raw)
    known["by_step"] = tuple(
        RankStepOverlap(**_known(RankStepOverlap, item)) for item in raw.get("by_step", ())
    )
    known["computing"] = tuple((start, end) for start, end in raw.get("computing", ()))
    return RankOverlap(**known)


def _bucket(raw: Mapping[str, Any]) -> BucketOverlap:
    known = _known(BucketOverlap, raw)
    known["ranks"] = tuple(BucketPart(**_known(BucketPart, item)) for item in raw["ranks"])
    return BucketOverlap(**known)


def _advice(raw: Mapping[str, Any] | None) -> BucketAdvice | None:
    if raw is None:
        return None
    known = _known(BucketAdvice, raw)
    for key in ("now", "best"):
        known[key] = BucketLayout(**_known(BucketLayout, raw[key]))
    known["tried"] = tuple(BucketLayout(**_known(BucketLayout, item)) for item in raw["tried"])
    return BucketAdvice(**known)


def _known(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in raw.items() if key in names}
