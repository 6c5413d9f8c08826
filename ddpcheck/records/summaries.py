"""Sums up the records of many steps while they are written: what is left of them once they are folded.

Standard library only: ranks sum up what they write.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddpcheck.records.codecs import ITEM_BYTES, decode85
from ddpcheck.records.registry import (
    BlockTable,
    Record,
    TextEncoding,
    block_table,
    field_defaults,
    to_mapping,
)

MODULUS = 1 << 128
# Of folded steps, the records of these multiples are kept, on all ranks: series of a report keep multiples of powers of
# two.
SAMPLE_EVERY = 1024
# Fields that say where a record belongs.
_POSITIONS = ("step", "forward", "number")
_MOST_TEXT = 256


def step_of(record: Record) -> int | None:
    """The step of a record of a table; that of the forward where it states no other."""
    step = getattr(record, "step", None)
    step = getattr(record, "forward", None) if step is None else step
    return step if type(step) is int else None


class Summary:
    """Of the records of one part of a file."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self._sampled: set[int] = set()
        self._tables: dict[tuple[Any, ...], _TableSummary] = {}

    def sample(self, record: Record) -> None:
        """Keep a record as it is. It is not summed up."""
        self.samples.append(to_mapping(record))
        self._sampled.add(id(record))

    def add(self, rows: Sequence[Record]) -> None:
        """Add records of one table."""
        if self._sampled:
            rows = [row for row in rows if id(row) not in self._sampled]
        table = block_table(type(rows[0])) if rows else None
        if table is None:
            return
        key = table_key(rows[0], table)
        summary = self._tables.get(key)
        if summary is None:
            summary = self._tables[key] = _TableSummary(rows[0], table)
        summary.add(rows)

    def forget_samples(self) -> None:
        """All records that were kept have been passed to `add`: others may get their identities."""
        self._sampled.clear()

    def folded(self) -> list[dict[str, Any]]:
        return [table.fields() for table in self._tables.values()]


def table_key(record: Record, table: BlockTable) -> tuple[Any, ...]:
    return (record.kind, *(getattr(record, name) for name in table.by))


def contains_multiple(record: Record, number: int) -> bool:
    """Whether a record of one or several steps contains a multiple of `number`."""
    step = step_of(record)
    return step is not None and -(-step // number) * number < step + _steps_in(record)


def _steps_in(record: Record) -> int:
    lists = [len(value) for value in vars(record).values() if type(value) is list]
    return max(1, *lists, getattr(record, "steps", 1))


class Positions:
    """The last step of each table that is compared across ranks."""

    def __init__(self) -> None:
        self._steps: dict[tuple[Any, ...], int] = {}

    def add(self, rows: Sequence[Record]) -> None:
        table = block_table(type(rows[0]))
        step = step_of(rows[-1])
        if table is not None and not table.of_one_rank and step is not None:
            self._steps[table_key(rows[0], table)] = step

    def digest(self) -> str:
        text = repr(sorted((repr(key), step) for key, step in self._steps.items()))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _TableSummary:
    def __init__(self, row: Record, table: BlockTable) -> None:
        self._kind = row.kind
        self._table = table
        self._by = {name: getattr(row, name) for name in table.by}
        self._rows = 0
        self._first = self._last = step_of(row) or 0
        self._digests: dict[str, int] = {}
        self._numbers: dict[str, list[Any]] = {}
        self._norms: dict[str, list[int]] = {}
        self._latest: dict[str, Any] = {}

    def add(self, rows: Sequence[Record]) -> None:
        steps = [step_of(row) or 0 for row in rows]
        self._rows += len(rows)
        self._first, self._last = min(self._first, *steps), max(self._last, *steps)
        for name, default in field_defaults(type(rows[0])):
            if name in self._by or name in _POSITIONS:
                continue
            values = [getattr(row, name) for row in rows]
            encoding = self._table.texts.get(name)
            if encoding is TextEncoding.HEX:
                self._add_digests(name, values, steps)
            elif encoding is TextEncoding.SKETCHES:
                self._add_norms(name, values)
            elif encoding is None:
                self._add_values(name, values, default)

    def _add_digests(self, name: str, values: list[str], steps: Sequence[int]) -> None:
        total = sum(
            int(value, 16) * (2 * step + 1) for value, step in zip(values, steps, strict=True) if value
        )
        self._digests[name] = (self._digests.get(name, 0) + total) % MODULUS

    def _add_norms(self, name: str, values: list[str]) -> None:
        joined = "".join(values) if all(len(value) % 5 == 0 for value in values) else values[-1]
        codes = decode85(joined)[::ITEM_BYTES] if joined else b""
        if codes:
            known = self._norms.get(name, [255, 0])
            self._norms[name] = [min(known[0], *codes), max(known[1], *codes)]

    def _add_values(self, name: str, values: list[Any], default: Any) -> None:
        if values.count(default) == len(values) and name not in self._numbers:
            return
        if name in self._table.merged:
            for value in values:
                self._latest[name] = {**self._latest.get(name, {}), **value}
            return
        if type(values[0]) in (int, float):
            self._add_numbers(name, values)
        elif type(values[0]) is list:
            self._add_numbers(name, [each for value in values for each in value])
        elif type(values[0]) is dict:
            self._add_mappings(name, values)
        elif values[-1] is not None and len(str(values[-1])) <= _MOST_TEXT:
            self._latest[name] = values[-1]

    def _add_mappings(self, name: str, values: Iterable[Mapping[str, Any]]) -> None:
        """Numbers by key, or lists of them."""
        by_key: dict[str, list[Any]] = {}
        for value in values:
            for key, each in value.items():
                by_key.setdefault(key, []).extend(each if type(each) is list else [each])
        for key, numbers in by_key.items():
            self._add_numbers(f"{name}.{key}", numbers)

    def _add_numbers(self, name: str, values: Iterable[Any]) -> None:
        numbers = [value for value in values if type(value) in (int, float) and math.isfinite(value)]
        if not numbers:
            return
        known = self._numbers.get(name)
        least, most = min(numbers), max(numbers)
        if known is None:
            self._numbers[name] = [len(numbers), sum(numbers), least, most]
        else:
            self._numbers[name] = [
                known[0] + len(numbers),
                known[1] + sum(numbers),
                min(known[2], least),
                max(known[3], most),
            ]

    def fields(self) -> dict[str, Any]:
        """Those of a `FoldedRecord`."""
        raw = {
            "of": self._kind,
            "by": self._by,
            "rows": self._rows,
            "first": self._first,
            "last": self._last,
            "digests": {name: f"{total:032x}" for name, total in self._digests.items()},
            "numbers": self._numbers,
            "norms": self._norms,
            "latest": self._latest,
        }
        return {name: value for name, value in raw.items() if value or type(value) is int}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two summaries of one table, the later one second, as one."""
    numbers = {name: list(row) for name, row in one.get("numbers", {}).items()}
    for name, row in other.get("numbers", {}).items():
        known = numbers.get(name)
        numbers[name] = (
            list(row)
            if known is None
            else [known[0] + row[0], known[1] + row[1], min(known[2], row[2]), max(known[3], row[3])]
        )
    digests = dict(one.get("digests", {}))
    for name, text in other.get("digests", {}).items():
        digests[name] = f"{(int(digests.get(name, '0'), 16) + int(text, 16)) % MODULUS:032x}"
    norms = dict(one.get("norms", {}))
    for name, row in other.get("norms", {}).items():
        known = norms.get(name, row)
        norms[name] = [min(known[0], row[0]), max(known[1], row[1])]
    latest = dict(one.get("latest", {}))
    for name, value in other.get("latest", {}).items():
        both = type(value) is dict and type(latest.get(name)) is dict
        latest[name] = {**latest[name], **value} if both else value
    return {
        **one,
        "rows": one["rows"] + other["rows"],
        "first": min(one["first"], other["first"]),
        "last": max(one["last"], other["last"]),
        "digests": digests,
        "numbers": numbers,
        "norms": norms,
        "latest": latest,
    }
