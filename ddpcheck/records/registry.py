"""The kinds of records that a rank writes, and their encoding as JSON lines.

A record is a frozen dataclass in a module of `ddpcheck.records.kinds`. It registers itself:

    @record("loss")
    @dataclass(frozen=True)
    class LossRecord(Record):
        ...

Writers import the record class they need. Readers look up classes by kind: the first lookup imports every module of
`ddpcheck.records.kinds`, so a new kind needs no entry in any list.

Standard library only: this is imported inside ranks.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar

# Version of the record files. Readers accept every version listed here.
# 1 (2026-11): first version.
SCHEMA = 1

RANK_FILES = "rank-*.jsonl"


@dataclass(frozen=True)
class Record:
    """Base class of all records."""

    kind: ClassVar[str] = ""


_AnyRecord = TypeVar("_AnyRecord", bound=Record)
_registered: dict[str, type[Record]] = {}
# The name and default of each field; `MISSING` for a field without default.
_defaults: dict[type[Record], list[tuple[str, Any]]] = {}


def record(kind: str) -> Callable[[type[_AnyRecord]], type[_AnyRecord]]:
    """Register a record class. `kind` identifies it in the record files: it never changes."""

    def register(cls: type[_AnyRecord]) -> type[_AnyRecord]:
        other = _registered.setdefault(kind, cls)
        if other is not cls:
            raise ValueError(
                f"Two classes for records of kind {kind!r}: {other.__name__} and {cls.__name__}."
            )
        cls.kind = kind
        _defaults[cls] = [
            (field.name, field.default if field.default_factory is MISSING else field.default_factory())
            for field in fields(cls)
        ]
        return cls

    return register


@cache
def record_kinds() -> Mapping[str, type[Record]]:
    """All record classes by kind."""
    package = import_module("ddpcheck.records.kinds")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return dict(_registered)


def to_line(record: Record) -> bytes:
    """Encode a record as one JSON line. Fields at their default are left out, which keeps step records small."""
    raw: dict[str, Any] = {"kind": record.kind}
    for name, default in _defaults[type(record)]:
        value = getattr(record, name)
        if name == "schema" or value != default:
            raw[name] = value
    return json.dumps(raw, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def from_mapping(raw: Mapping[str, Any]) -> Record | None:
    """The record in `raw`, or None where its kind is unknown or a required field is missing.

    Unknown fields are ignored, so files of newer versions are read as far as this version understands them.
    """
    cls = record_kinds().get(str(raw.get("kind")))
    if cls is None:
        return None
    names = {name for name, _ in _defaults[cls]}
    try:
        return cls(**{key: value for key, value in raw.items() if key in names})
    except TypeError:
        return None
