"""Blocks: the records of many steps as columns, in one line of a rank's file.

A line that is not JSON is a block:

    02 version escaped(crc32 size deflated stored) newline

`escaped` replaces 1b by 1b 'e', a newline by 1b 'n' and a carriage return by 1b 'r', so that a file is a sequence
of lines, whatever they hold. `crc32` has four bytes and covers what follows; `size` has four bytes too, and is the
length of `deflated`, a zlib stream with the preset dictionary `_DICTIONARY`. It inflates to a header, one line of
JSON, and data. `stored` continues the data with what cannot be compressed, as digests cannot:

    {"order": part, "tables": [[kind, rows, {field: value}, [[field, encoding, argument, [part, ...]]]]]}

A part is [offset, size] in the data. A table holds records of one kind: the fields that all of them share, and a
column for each other field that is not at its default. `order` has one byte for each record: the index of the table
to take the next row from. `Encoding` lists how columns are encoded. Numbers have the lowest byte first. Standard
library only: ranks write blocks.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING
from enum import Enum
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from ddpcheck.records.codecs import ITEM_BYTES, decode85
from ddpcheck.records.registry import Record, TextEncoding, block_table, field_defaults, record_kinds

MARK = b"\x02"
VERSION = b"1"
# A block is inflated as a whole: a larger one is damaged.
MOST_BYTES = 64 << 20
MOST_ROWS = 1 << 16
# Of an index into the tables, in `order`.
MOST_TABLES = 256
# Nearly everything that can be compressed at all compresses at the fastest level.
_LEVEL = 1
# Longer parts are stored as they are if compression takes less than this share off their beginning.
_SAMPLED_BYTES = 1024
_SHORT_TEXT = 64
_LEAST_SAVING = 0.05
_BIG_ENDIAN = sys.byteorder == "big"


class Encoding(str, Enum):
    """How the values of a column are encoded. All rows of a text column have the same number of bytes."""

    # Argument [first, difference]: no data.
    RANGE = "range"
    # Argument [first, bytes]: differences between consecutive values, the first of them 0.
    DELTA = "delta"
    # Argument [first, bytes, scale]: the same of values that are multiples of 1/scale.
    DECIMAL = "decimal"
    DOUBLE = "double"
    # Argument: bytes of each row.
    HEX = TextEncoding.HEX.value
    BASE64 = TextEncoding.BASE64.value
    # The same; base 85. One part with the first bytes of all sketches of all rows, one with the second bytes, ...
    SKETCHES = TextEncoding.SKETCHES.value
    # A list of JSON.
    JSON = "json"


_INTEGERS = {1: "b", 2: "h", 4: "i", 8: "q"}
_SCALES = (10_000, 1_000_000)
# Headers of blocks resemble each other. Part of the format: another dictionary needs another version.
_DICTIONARY = (
    b'{"order":[0,"tables":[["clocks",1,{"step":0,"total":[],"data":[],"forward":[],"backward":[],"wait":[],'
    b'"optimizer":[],"watching":[],"queued":[],"faults":[],"kernel":[],"device":{}},[["hyper",{"optimizer":0},'
    b'[["changed","json",null,["memory",["host","delta",["high","delta",["allocated",["reserved",["peak",'
    b'["loss",["values","json",null,["cost",["steps","wall","spent","device","params_every",'
    b'["batch",{"module":0,"rows":32},[["forward","range",[1,1],0,0],["step","range",[0,1],0,0],["digest","hex",6,'
    b'["digest",{"module":0,"stage":"params","of":"buffers","optimizer":0,"width":1,"hyper":""},'
    b'[["step","range",[0,1],0,0],["root","hex",16,["leaves","base64",["time","decimal",[0,4,10000],'
    b'["forward","range",[1,1],0,0]]],["applied",{"optimizer":0,"module":0},[["step","range",[0,1],0,0],'
    b'["root","hex",16,["backward",{"module":0},[["number","range",[1,1],0,0],["step","range",[0,1],0,0],'
    b'["local","sketches",["reduced","sketches",["root","hex",8,["time","decimal",[0,8,1000000],'
)


class BlockError(ValueError):
    """A line that is no valid block, or one of a version that is not known."""


class RecordColumn:
    """The values of one field, as stored."""

    __slots__ = ("_decoded", "argument", "data", "encoding", "rows")

    def __init__(self, encoding: Encoding, argument: Any, data: bytes, rows: int) -> None:
        self.encoding, self.argument, self.data, self.rows = encoding, argument, data, rows
        self._decoded: list[Any] | None = None

    def values(self) -> list[Any]:
        """The values as in the records. ValueError, TypeError or LookupError where the column is damaged."""
        if self.encoding is not Encoding.JSON:
            return _DECODERS[self.encoding](self)
        # Decoded to be checked, and then used.
        if self._decoded is None:
            self._decoded = _json(self)
        return self._decoded

    def value_at(self, row: int) -> Any:
        """One value; of most columns the others are not decoded."""
        match self.encoding:
            case Encoding.RANGE:
                return self.argument[0] + self.argument[1] * row
            case Encoding.DELTA | Encoding.DECIMAL:
                first, size = self.argument[:2]
                number = first + sum(_numbers(_INTEGERS[size], self)[: row + 1])
                return number if self.encoding is Encoding.DELTA else number / self.argument[2]
            case Encoding.HEX:
                return self.data[row * self.width : (row + 1) * self.width].hex()
            case Encoding.BASE64:
                return base64.b64encode(self.data[row * self.width : (row + 1) * self.width]).decode("ascii")
        return self.values()[row]

    def bytes_of_rows(self) -> bytes:
        """The bytes of all rows of a text column, one after the other."""
        if self.encoding is not Encoding.SKETCHES:
            return self.data
        whole = bytearray(len(self.data))
        size = len(self.data) // ITEM_BYTES
        for number in range(ITEM_BYTES):
            whole[number::ITEM_BYTES] = self.data[number * size : (number + 1) * size]
        return bytes(whole)

    @property
    def width(self) -> int:
        """Bytes of each row of a text column."""
        if type(self.argument) is not int or self.argument <= 0:
            raise ValueError("a column without a width")
        return self.argument


class RecordTable:
    """Records of one kind: the fields that they share, and columns."""

    __slots__ = ("columns", "constants", "record", "rows")

    def __init__(
        self, record: type[Record], rows: int, constants: dict[str, Any], columns: dict[str, RecordColumn]
    ) -> None:
        self.record, self.rows, self.constants, self.columns = record, rows, constants, columns

    def records(self) -> list[Record]:
        if not self.columns:
            return [self._record({})] * self.rows
        names = list(self.columns)
        columns = [self.columns[name].values() for name in names]
        return [self._record(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]

    def record_at(self, row: int) -> Record:
        return self._record({name: column.value_at(row) for name, column in self.columns.items()})

    def _record(self, values: dict[str, Any]) -> Record:
        """As the constructor makes it, which sets one field at a time: there are millions of records."""
        record = object.__new__(self.record)
        record.__dict__.update(self.constants)
        record.__dict__.update(values)
        return record


class Block:
    """A decoded block."""

    __slots__ = ("order", "skipped", "tables")

    def __init__(self, tables: Sequence[RecordTable | None], order: bytes, skipped: int) -> None:
        # By index in `order`; None for a kind that this version does not know.
        self.tables, self.order = tables, order
        self.skipped = skipped

    @property
    def rows(self) -> int:
        return len(self.order)

    def records(self) -> Iterator[Record]:
        """The records in the order in which they were written."""
        rows = [iter(table.records()) if table is not None else None for table in self.tables]
        for index in self.order:
            table = rows[index]
            if table is not None:
                yield next(table)


def is_block(line: bytes) -> bool:
    return line.startswith(MARK)


class BlockBuilder:
    """Collects records until they are written as a block."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], tuple[int, list[Record]]] = {}
        self.order = bytearray()
        # The records in order, and about how much memory their texts take.
        self.records: list[Record] = []
        self.size = 0

    def __len__(self) -> int:
        return len(self.order)

    def add(self, record: Record) -> bool:
        """False for a record that is no row, or does not fit any more."""
        table = block_table(type(record))
        if table is None or (getattr(record, "step", 0) or 0) < 0 or len(self.order) >= MOST_ROWS:
            return False
        texts = [len(getattr(record, name)) for name in table.texts]
        # Rows of a text column have the same length.
        key = (record.kind, *[getattr(record, name) for name in table.by], *texts)
        known = self._tables.get(key)
        if known is None:
            if len(self._tables) >= MOST_TABLES:
                return False
            known = self._tables[key] = (len(self._tables), [])
        known[1].append(record)
        self.order.append(known[0])
        self.records.append(record)
        self.size += 64 + sum(texts)
        return True

    def tables(self) -> list[list[Record]]:
        """The records by table."""
        return [rows for _, rows in self._tables.values()]

    def line(self) -> bytes:
        """The block, with its newline."""
        data = _BlockData()
        order = data.add(bytes(self.order))
        tables = [_table(rows, data) for _, rows in self._tables.values()]
        data.assign_offsets()
        header = json.dumps({"order": order, "tables": tables}, separators=(",", ":")).encode()
        packer = zlib.compressobj(_LEVEL, zdict=_DICTIONARY)
        deflated = packer.compress(header + b"\n" + b"".join(data.compressed)) + packer.flush()
        checked = b"".join([len(deflated).to_bytes(4, "little"), deflated, *data.stored])
        whole = zlib.crc32(checked).to_bytes(4, "little") + checked
        return MARK + VERSION + _escaped(whole) + b"\n"


class _BlockData:
    """Parts of a block, those that can be compressed first."""

    def __init__(self) -> None:
        self.compressed: list[bytes] = []
        self.stored: list[bytes] = []
        # [offset, size], filled in by `assign_offsets`.
        self._extents: tuple[list[list[int]], list[list[int]]] = ([], [])

    def add(self, data: bytes) -> list[int]:
        store = len(data) > _SAMPLED_BYTES and not _is_compressible(data[:_SAMPLED_BYTES])
        (self.stored if store else self.compressed).append(data)
        extent = [0, len(data)]
        self._extents[store].append(extent)
        return extent

    def assign_offsets(self) -> None:
        offset = 0
        for extent in (*self._extents[0], *self._extents[1]):
            extent[0] = offset
            offset += extent[1]


def _is_compressible(data: bytes) -> bool:
    return len(zlib.compress(data, _LEVEL)) < (1 - _LEAST_SAVING) * len(data)


def _table(rows: list[Record], data: _BlockData) -> list[Any]:
    cls = type(rows[0])
    table = block_table(cls)
    texts = table.texts if table is not None else {}
    constants: dict[str, Any] = {}
    columns: list[list[Any]] = []
    for name, default in field_defaults(cls):
        values = [getattr(row, name) for row in rows]
        first = values[0]
        is_constant = values.count(first) == len(values) and len(set(map(type, values))) == 1
        # A single long text is shorter as bytes.
        if is_constant and not (len(rows) == 1 and name in texts and len(first) > _SHORT_TEXT):
            if first != default or type(first) is not type(default):
                constants[name] = first
            continue
        encoding, argument, *parts = _encoded(values, texts.get(name))
        columns.append([name, encoding.value, argument, [data.add(part) for part in parts if part]])
    return [cls.kind, len(rows), constants, columns]


# Encoding, argument and parts.
_Encoded = tuple[Any, ...]


def _encoded(values: list[Any], text: TextEncoding | None) -> _Encoded:
    kinds = set(map(type, values))
    encoded = None
    if text is not None and kinds == {str}:
        encoded = _encoded_text(values, text)
    elif kinds == {int}:
        encoded = _encoded_integers(values)
    elif kinds == {float}:
        encoded = _encoded_floats(values)
    if encoded is not None:
        return encoded
    return Encoding.JSON, None, json.dumps(values, separators=(",", ":")).encode()


def _encoded_integers(values: list[int]) -> _Encoded | None:
    difference = values[1] - values[0]
    if all(after - before == difference for before, after in pairwise(values)):
        return Encoding.RANGE, [values[0], difference], b""
    return _encoded_differences(values)


def _encoded_differences(values: list[int]) -> _Encoded | None:
    differences = [after - before for before, after in pairwise(values)]
    least, most = min(differences), max(differences)
    size = next(
        (size for size in _INTEGERS if -1 << 8 * size - 1 <= least and most < 1 << 8 * size - 1), None
    )
    if size is None or max(map(abs, values)) >= 1 << 62:
        return None
    return Encoding.DELTA, [values[0], size], _little_endian(array(_INTEGERS[size], [0, *differences]))


def _encoded_floats(values: list[float]) -> _Encoded:
    exact = array("d", values)
    for scale in _SCALES:
        if max(map(abs, values)) * scale < 1 << 53:
            numbers = [round(value * scale) for value in values]
            # Compared by their bits: -0.0 equals 0.0.
            if array("d", [number / scale for number in numbers]).tobytes() == exact.tobytes():
                encoded = _encoded_differences(numbers)
                if encoded is not None:
                    return Encoding.DECIMAL, [*encoded[1], scale], encoded[2]
    return Encoding.DOUBLE, None, _little_endian(exact)


def _encoded_text(values: list[str], text: TextEncoding) -> _Encoded | None:
    if len(set(map(len, values))) != 1:
        return None
    joined = "".join(values)
    width = len(joined) // len(values)
    try:
        if text is TextEncoding.HEX:
            data = bytes.fromhex(joined)
            return (Encoding.HEX, width // 2, data) if width % 2 == 0 and data.hex() == joined else None
        if text is TextEncoding.BASE64:
            rows = [base64.b64decode(value, validate=True) for value in values]
            same = [base64.b64encode(row).decode() for row in rows] == values
            return (Encoding.BASE64, len(rows[0]), b"".join(rows)) if same else None
        # Texts of whole groups of five characters can be decoded at once.
        data = decode85(joined) if width % 5 == 0 else b"".join(map(decode85, values))
    except (ValueError, binascii.Error):
        return None
    size = len(data) // len(values)
    # Not every text has the digits that encoding its bytes gives; those of a whole group are unique.
    tail = size % 4
    ends = (
        [base64.b85encode(data[end - tail : end]) for end in range(size, len(data) + 1, size)] if tail else []
    )
    if not size or size % ITEM_BYTES or ends != [value[-len(ends[0]) :].encode() for value in values if tail]:
        return None
    return Encoding.SKETCHES, size, *(data[number::ITEM_BYTES] for number in range(ITEM_BYTES))


def _little_endian(numbers: array[Any]) -> bytes:
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def _numbers(code: str, column: RecordColumn) -> array[Any]:
    numbers = array(code)
    numbers.frombytes(column.data)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers


def _integers(column: RecordColumn) -> list[int]:
    first, size = column.argument[:2]
    differences = _numbers(_INTEGERS[size], column)
    return list(accumulate(differences, initial=first))[1:]


def _of_range(column: RecordColumn) -> list[int]:
    first, difference = column.argument
    return [first + difference * row for row in range(column.rows)]


def _decimals(column: RecordColumn) -> list[float]:
    scale = column.argument[2]
    return [number / scale for number in _integers(column)]


def _json(column: RecordColumn) -> list[Any]:
    values = json.loads(column.data)
    if type(values) is not list:
        raise TypeError("no list")
    return values


def _rows(column: RecordColumn) -> list[bytes]:
    data, width = column.bytes_of_rows(), column.width
    return [data[begin : begin + width] for begin in range(0, len(data), width)]


_DECODERS: dict[Encoding, Callable[[RecordColumn], list[Any]]] = {
    Encoding.RANGE: _of_range,
    Encoding.DELTA: _integers,
    Encoding.DECIMAL: _decimals,
    Encoding.DOUBLE: lambda column: _numbers("d", column).tolist(),
    Encoding.HEX: lambda column: [row.hex() for row in _rows(column)],
    Encoding.BASE64: lambda column: [base64.b64encode(row).decode("ascii") for row in _rows(column)],
    # As bytes: encoding takes longer than everything else, and who reads sketches wants the bytes.
    Encoding.SKETCHES: _rows,
    Encoding.JSON: _json,
}
# What `values` of a column returns, where it is the same for all columns of the encoding.
_TYPES: dict[Encoding, type] = {
    Encoding.RANGE: int,
    Encoding.DELTA: int,
    Encoding.DECIMAL: float,
    Encoding.DOUBLE: float,
    Encoding.HEX: str,
    Encoding.BASE64: str,
    Encoding.SKETCHES: str,
}
_ENCODINGS = {encoding.value: encoding for encoding in Encoding}
# Tests a value of a field: kind, name of the field, value.
FieldCheck = Callable[[str, str, Any], bool]


def _escaped(data: bytes) -> bytes:
    return data.replace(b"\x1b", b"\x1be").replace(b"\n", b"\x1bn").replace(b"\r", b"\x1br")


def _unescaped(data: bytes) -> bytes:
    return data.replace(b"\x1br", b"\r").replace(b"\x1bn", b"\n").replace(b"\x1be", b"\x1b")


def decode(line: bytes, is_valid: FieldCheck) -> Block:
    """The block in a line without its newline. BlockError where it is damaged."""
    try:
        return _decode(line, is_valid)
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        zlib.error,
        RecursionError,
        OverflowError,
    ) as error:
        raise BlockError(f"{type(error).__name__}: {error}") from error


def _decode(line: bytes, is_valid: FieldCheck) -> Block:
    if line[:2] != MARK + VERSION:
        raise BlockError("not a block of a known version")
    content = memoryview(_unescaped(line[2:]))
    if zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
        raise BlockError("wrong checksum")
    end = 8 + int.from_bytes(content[4:8], "little")
    inflater = zlib.decompressobj(zdict=_DICTIONARY)
    inflated = inflater.decompress(content[8:end], MOST_BYTES)
    if not inflater.eof:
        raise BlockError("too large, or incomplete")
    head, _, data = inflated.partition(b"\n")
    header, data = json.loads(head), data + content[end:]
    order = _part(data, *header["order"])
    if len(order) > MOST_ROWS:
        raise BlockError("too many rows")
    tables = [_table_of(raw, data, is_valid) for raw in header["tables"]]
    for index, (_, rows, *_) in enumerate(header["tables"]):
        if order.count(index) != rows:
            raise BlockError("an order that does not fit the tables")
    if len(order) and max(order) >= len(tables):
        raise BlockError("an unknown table")
    return Block(tables, order, sum(table is None for table in tables))


def _part(data: bytes, begin: int, size: int) -> bytes:
    if not 0 <= begin <= begin + size <= len(data):
        raise BlockError("a column beyond the data")
    return data[begin : begin + size]


def _table_of(raw: Any, data: bytes, is_valid: FieldCheck) -> RecordTable | None:
    kind, rows, given, columns = raw
    cls = record_kinds().get(kind)
    if cls is None:
        return None
    constants = _known_defaults(kind) | {
        name: value for name, value in given.items() if name in _names_of(kind)
    }
    decoded: dict[str, RecordColumn] = {}
    for name, encoding, argument, parts in columns:
        if name not in _names_of(kind):
            continue
        values = b"".join([_part(data, *part) for part in parts])
        column = decoded[name] = RecordColumn(_ENCODINGS[encoding], argument, values, rows)
        constants.pop(name, None)
        if not _is_valid_column(column, kind, name, is_valid):
            raise BlockError(f"a column of the wrong type: {name}")
    for name, value in given.items():
        if name in constants and not is_valid(kind, name, value):
            raise BlockError(f"a value of the wrong type: {name}")
    if _names_of(kind) - constants.keys() - decoded.keys():
        raise BlockError("a missing column")
    return RecordTable(cls, rows, constants, decoded)


@cache
def _accepts(kind: str, name: str, value: type, is_valid: FieldCheck) -> bool:
    return is_valid(kind, name, value())


def _is_valid_column(column: RecordColumn, kind_of_record: str, name: str, is_valid: FieldCheck) -> bool:
    kind = _TYPES.get(column.encoding)
    if kind is None:
        values = column.values()
        return len(values) == column.rows and all(is_valid(kind_of_record, name, value) for value in values)
    if not _accepts(kind_of_record, name, kind, is_valid):
        return False
    # Not decoded here: most columns are compared as arrays, or not read.
    size = len(column.data)
    match column.encoding, column.argument:
        case Encoding.RANGE, [int(), int()]:
            return True
        case (Encoding.DELTA, [int(), width]) | (Encoding.DECIMAL, [int(), width, 10_000 | 1_000_000]):
            return width in _INTEGERS and size == column.rows * width
        case Encoding.DOUBLE, _:
            return size == column.rows * 8
        case Encoding.SKETCHES, _:
            return size == column.rows * column.width and not column.width % ITEM_BYTES
        case Encoding.HEX | Encoding.BASE64, _:
            return size == column.rows * column.width
    return False


@cache
def _names_of(kind: str) -> frozenset[str]:
    return frozenset(name for name, _ in field_defaults(record_kinds()[kind]))


@cache
def _known_defaults(kind: str) -> dict[str, Any]:
    defaults = field_defaults(record_kinds()[kind])
    return {name: default for name, default in defaults if default is not MISSING}
