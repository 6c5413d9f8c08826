"""The key `time` of report.json, back into what it was written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddpcheck.analysis.timing.model import (
    CrossCheck,
    RankTime,
    Refaults,
    Scaling,
    Spent,
    Straggler,
    TimeTable,
)


def time_table(raw: Mapping[str, Any]) -> TimeTable:
    known = _known(TimeTable, raw)
    known["group"] = tuple(known["group"])
    known["ranks"] = tuple(_rank(item) for item in known["ranks"])
    known["scaling"] = Scaling(**_known(Scaling, known["scaling"]))
    check = known.get("cross_check")
    known["cross_check"] = None if check is None else CrossCheck(**_known(CrossCheck, check))
    refaults = known.get("refaults")
    known["refaults"] = None if refaults is None else Refaults(**_known(Refaults, refaults))
    late = known.get("straggler")
    known["straggler"] = None if late is None else _straggler(late)
    return TimeTable(**known)


def _rank(raw: Mapping[str, Any]) -> RankTime:
    known = _known(RankTime, raw)
    known["step"] = Spent(**_known(Spent, known["step"]))
    known["parts"] = {name: Spent(**_known(Spent, item)) for name, item in known["parts"].items()}
    known["course_us"] = tuple(known.get("course_us", ()))
    return RankTime(**known)


def _straggler(raw: Mapping[str, Any]) -> Straggler:
    known = _known(Straggler, raw)
    known["ranks"] = tuple(known["ranks"])
    return Straggler(**known)


def _known(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in raw.items() if key in names}
