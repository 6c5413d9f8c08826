"""Columns of the records of many steps and all ranks, as arrays."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.records.blocks import Encoding, RecordColumn, RecordTable
from ddpcheck.records.codecs import unwrap
from ddpcheck.records.registry import Record, TextEncoding, block_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Fewer rows are decoded one by one.
_FEW_ROWS = 8
_SIZES = {1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8"}


def integers(table: RecordTable, name: str) -> NDArray[np.int64]:
    """An integer field of all rows."""
    column = table.columns.get(name)
    if column is None:
        return np.full(table.rows, table.constants[name], np.int64)
    if column.encoding is Encoding.RANGE:
        first, difference = column.argument
        values: NDArray[np.int64] = first + difference * np.arange(column.rows, dtype=np.int64)
        return values
    if column.encoding is Encoding.DELTA:
        return _integers(column)
    return np.array(column.values(), np.int64)


def _integers(column: RecordColumn) -> NDArray[np.int64]:
    first, size = column.argument[:2]
    values: NDArray[np.int64] = first + np.cumsum(np.frombuffer(column.data, _SIZES[size]), dtype=np.int64)
    return values


def floats(table: RecordTable, name: str) -> NDArray[np.float64]:
    column = table.columns.get(name)
    if column is None:
        return np.full(table.rows, table.constants[name], np.float64)
    if column.encoding is Encoding.DECIMAL:
        values: NDArray[np.float64] = _integers(column) / column.argument[2]
        return values
    return np.array(column.values(), np.float64)


def texts(table: RecordTable, name: str) -> NDArray[np.uint8] | None:
    """The bytes that the text of each row encodes, one row each; None where they differ in length."""
    column = table.columns.get(name)
    if column is None:
        try:
            data = _decoded(table, name)
        except ValueError:
            return None
        return np.broadcast_to(np.frombuffer(data, np.uint8), (table.rows, len(data)))
    if column.encoding is Encoding.JSON:
        return None
    if column.encoding is Encoding.SKETCHES:
        # Planes of bytes, the first one with the codes of the norms.
        return np.ascontiguousarray(np.frombuffer(column.data, np.uint8).reshape(5, -1).T).reshape(
            column.rows, -1
        )
    return np.frombuffer(column.data, np.uint8).reshape(column.rows, -1)


def _decoded(table: RecordTable, name: str) -> bytes:
    value = table.constants[name]
    encodings = block_table(table.record)
    match encodings.texts.get(name) if encodings is not None else None:
        case TextEncoding.HEX:
            return bytes.fromhex(value)
        case TextEncoding.BASE64:
            return base64.b64decode(value, validate=True)
        case TextEncoding.SKETCHES:
            return unwrap(value)
    raise ValueError(f"{name} encodes nothing")


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a table."""

    table: RecordTable
    begin: int
    end: int


@dataclass(frozen=True)
class Stream:
    """Records of one kind of one module in the steps of a window, equally many on all ranks."""

    record: type[Record]
    module: ModuleKey
    # Fields that all of them share.
    constants: Mapping[str, Any]
    ranks: Sequence[RankData]
    # By rank, in the same order.
    rows: Sequence[Sequence[Rows]]
    # Of one rank; equal on all.
    steps: NDArray[np.int64]
    _records: dict[int, list[Record]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def integers(self, name: str) -> NDArray[np.int64]:
        """One row per rank."""
        return np.stack(
            [_joined([integers(one.table, name)[one.begin : one.end] for one in rows]) for rows in self.rows]
        )

    def floats(self, name: str) -> NDArray[np.float64]:
        return np.stack(
            [_joined([floats(one.table, name)[one.begin : one.end] for one in rows]) for rows in self.rows]
        )

    def texts(self, name: str) -> NDArray[np.uint8] | None:
        """By rank, row and byte; None where the lengths differ."""
        arrays = [self.texts_of(index, name) for index in range(len(self.ranks))]
        known = [each for each in arrays if each is not None]
        if len(known) < len(arrays) or len({each.shape[1] for each in known}) != 1:
            return None
        return np.stack(known)

    def texts_of(self, rank: int, name: str) -> NDArray[np.uint8] | None:
        """By row and byte, of the rank at this position in `ranks`; None where the lengths differ."""
        parts = [_slice(one, name) for one in self.rows[rank]]
        if (
            any(part is None for part in parts)
            or len({part.shape[1] for part in parts if part is not None}) != 1
        ):
            return None
        joined: NDArray[np.uint8] = _joined(parts)
        return joined

    def values_of(self, rank: int, name: str) -> list[Any]:
        """Any field of the rank at this position in `ranks`, row by row."""
        values: list[Any] = []
        for one in self.rows[rank]:
            column = one.table.columns.get(name)
            if column is None:
                values += [one.table.constants[name]] * (one.end - one.begin)
            else:
                values += column.values()[one.begin : one.end]
        return values

    def is_equal_on_all_ranks(self, name: str) -> bool:
        """Whether a field has the same values on all ranks, row by row."""
        ranges = [_ranges(rows, name) for rows in self.rows]
        if None not in ranges and all(other == ranges[0] for other in ranges):
            return True
        first, *others = [self.values_of(index, name) for index in range(len(self.ranks))]
        return all(other == first for other in others)

    def record_at(self, rank: int, row: int) -> Record:
        """The record of the rank at this position in `ranks`."""
        if len(self) >= _FEW_ROWS and row:
            return self.records_of(rank)[row]
        # The others are not decoded.
        for one in self.rows[rank]:
            if row < one.end - one.begin:
                return one.table.record_at(one.begin + row)
            row -= one.end - one.begin
        raise IndexError(row)

    def records_of(self, rank: int) -> list[Record]:
        known = self._records.get(rank)
        if known is None:
            known = self._records[rank] = [
                record for one in self.rows[rank] for record in one.table.records()[one.begin : one.end]
            ]
        return known

    def part(self, begin: int, end: int) -> Stream:
        """Some of the rows."""
        return replace(
            self,
            rows=[_part(rows, begin, end) for rows in self.rows],
            steps=self.steps[begin:end],
            _records={},
        )

    def last_of(self, rank: int) -> Record:
        """The last record of the rank; the others are not decoded."""
        one = self.rows[rank][-1]
        return one.table.record_at(one.end - 1)


def _ranges(rows: Sequence[Rows], name: str) -> list[list[Any]] | None:
    """[first, difference, number of rows] of consecutive rows; None for columns without constant differences."""
    runs: list[list[Any]] = []
    for one in rows:
        column = one.table.columns.get(name)
        count = one.end - one.begin
        if column is None:
            first, difference = one.table.constants[name], 0
            continues = bool(runs) and runs[-1][:2] == [first, 0]
        elif column.encoding is Encoding.RANGE:
            first, difference = column.argument[0] + column.argument[1] * one.begin, column.argument[1]
            continues = (
                bool(runs) and type(runs[-1][0]) is int and runs[-1][0] + runs[-1][1] * runs[-1][2] == first
            )
            continues = continues and runs[-1][1] == difference
        else:
            return None
        if continues:
            runs[-1][2] += count
        else:
            runs.append([first, difference, count])
    return runs


def _part(rows: Sequence[Rows], begin: int, end: int) -> list[Rows]:
    parts, position = [], 0
    for each in rows:
        first, last = max(begin - position, 0), min(end - position, each.end - each.begin)
        if first < last:
            parts.append(Rows(each.table, each.begin + first, each.begin + last))
        position += each.end - each.begin
    return parts


def _slice(rows: Rows, name: str) -> NDArray[np.uint8] | None:
    whole = texts(rows.table, name)
    return None if whole is None else whole[rows.begin : rows.end]


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def equal_on_all_ranks(values: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """By row: whether all ranks have the same bytes."""
    equal: NDArray[np.bool_] = (values == values[:1]).all(axis=(0, 2))
    return equal
