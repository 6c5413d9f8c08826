"""The kinds of records that a rank writes, and their encoding as JSON lines or as rows of a block.

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

import base64
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar

# Version of the record files. Readers accept every version listed here.
# 1 (2026-11): first version: JSON lines.
# 2 (2026-11): records that are written at every step are in blocks between the lines: see `ddpcheck.records.blocks`.
# 3 (2026-11): long files are continued in parts, of which some are folded: see `ddpcheck.records.folding`.
SCHEMA = 3

RANK_FILES = "rank-*.jsonl"
# Beside each file while its rank runs: the records of the block that the rank collects.
RECENT_SUFFIX = ".recent"
_RECENT_KIND, _RECENT_PART = "after", "part"
# Its further parts, by number, and what is left of those that were folded.
PART_SUFFIX, FOLDED_SUFFIX = ".part", ".folded"


@dataclass(frozen=True)
class Record:
    """Base class of all records."""

    kind: ClassVar[str] = ""

    def is_possible(self) -> bool:
        """Whether a job can have written these values. Readers drop and count a record that is not."""
        return True


class TextEncoding(str, Enum):
    """What the text of a field encodes: a block holds the bytes themselves."""

    HEX = "hex"
    BASE64 = "base64"
    # Sketches: `ddpcheck.records.codecs.pack`.
    SKETCHES = "sketches"


@dataclass(frozen=True)
class BlockTable:
    """How a block holds the records of a class: records that are equal in the fields `by` are the rows of one table."""

    by: tuple[str, ...] = ()
    texts: Mapping[str, TextEncoding] = field(default_factory=dict)
    # Each rank writes them at moments of its own: they are not compared row by row.
    of_one_rank: bool = False
    # Fields with what has changed: a summary keeps the last value of each key.
    merged: tuple[str, ...] = ()


_AnyRecord = TypeVar("_AnyRecord", bound=Record)
_registered: dict[str, type[Record]] = {}
_tables: dict[type[Record], BlockTable] = {}
_repeated: set[str] = set()
# The name and default of each field; `MISSING` for a field without default.
_defaults: dict[type[Record], list[tuple[str, Any]]] = {}


def record(
    kind: str, table: BlockTable | None = None, *, repeated: bool = False
) -> Callable[[type[_AnyRecord]], type[_AnyRecord]]:
    """Register a record class. `kind` identifies it in the record files: it never changes.

    `table`: records of the class come at every step, and are written in blocks. `repeated`: they come again and again,
    such as at every epoch; of long folded stretches only some are kept.
    """

    def register(cls: type[_AnyRecord]) -> type[_AnyRecord]:
        other = _registered.setdefault(kind, cls)
        if other is not cls:
            raise ValueError(
                f"Two classes for records of kind {kind!r}: {other.__name__} and {cls.__name__}."
            )
        cls.kind = kind
        if table is not None:
            _tables[cls] = table
        if repeated:
            _repeated.add(kind)
        _defaults[cls] = [
            (each.name, each.default if each.default_factory is MISSING else each.default_factory())
            for each in fields(cls)
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


def block_table(cls: type[Record]) -> BlockTable | None:
    """None for a class whose records are lines of their own."""
    return _tables.get(cls)


def is_repeated(kind: str) -> bool:
    """Whether records of this kind come again and again, as events."""
    record_kinds()
    return kind in _repeated


def field_defaults(cls: type[Record]) -> list[tuple[str, Any]]:
    """The name and default of each field; `MISSING` for a field without default."""
    return _defaults[cls]


def to_mapping(record: Record) -> dict[str, Any]:
    """The fields of a record. Those at their default are left out, which keeps records small."""
    raw: dict[str, Any] = {"kind": record.kind}
    for name, default in _defaults[type(record)]:
        value = getattr(record, name)
        if name == "schema" or value != default:
            # Sketches of a record from a block.
            raw[name] = base64.b85encode(value).decode("ascii") if type(value) is bytes else value
    return raw


def to_line(record: Record) -> bytes:
    """Encode a record as one JSON line."""
    return json.dumps(to_mapping(record), separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def recent_header(size: int, part: int = 0) -> bytes:
    """The first line of a file of recent records: the part of the rank's file when it was begun, and its size."""
    numbers = {_RECENT_KIND: size, **({_RECENT_PART: part} if part else {})}
    return json.dumps(numbers).encode() + b"\n"


def size_before(header: bytes) -> tuple[int, int]:
    """The part and its size in `recent_header`; (0, -1) where the line is damaged."""
    try:
        raw = json.loads(header)
    except (ValueError, RecursionError):
        return 0, -1
    if not isinstance(raw, dict):
        return 0, -1
    part, size = raw.get(_RECENT_PART, 0), raw.get(_RECENT_KIND)
    return (part, size) if type(part) is int and type(size) is int else (0, -1)


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
