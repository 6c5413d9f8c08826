"""Reads record files as they grow; whatever cannot be understood is counted and passed over."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ddpcheck.records.schema import KINDS, Record, from_mapping

Fits = Callable[[Any], bool]
# What JSON gives for each type; a whole number serves as a float, but a bool never as a number.
_PLAIN: dict[Any, set[type]] = {
    int: {int},
    float: {int, float},
    str: {str},
    bool: {bool},
    type(None): {type(None)},
}

# Far beyond any record we write: a longer line is garbage and must not fill the memory.
LONGEST_LINE = 64 << 20
CHUNK = 1 << 20


class RecordFile:
    """One rank's file. Reading can go on while the rank still writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad = 0
        self._offset = 0
        self._rest = b""
        self._overlong = False
        self._lines: deque[bytes] = deque()

    def read(self, most: int = 512, chunk: int | None = None) -> list[Record]:
        """Up to `most` further lines; none at the present end of the file. A torn last line is left.

        `chunk`: how much of the file is fetched at a time, where many files are read side by side.
        """
        records: list[Record] = []
        while not records:
            if not self._lines and not self._fill(chunk or CHUNK):
                break
            for line in [self._lines.popleft() for _ in range(min(most, len(self._lines)))]:
                record = parse(line)
                if record is None:
                    self.bad += 1
                else:
                    records.append(record)
        return records

    @property
    def torn(self) -> bool:
        """Whether the file ends, for now, in the middle of a line."""
        return bool(self._rest)

    def _fill(self, chunk: int) -> bool:
        """Read on to the end of at least one line; False where the file has none, for now."""
        while data := self._chunk(chunk):
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines and self._overlong:
                # The end of what was given up before; it has been counted.
                self._overlong = False
                lines = lines[1:]
            if len(self._rest) > LONGEST_LINE or self._overlong:
                self.bad += not self._overlong
                self._rest, self._overlong = b"", True
            self._lines = deque(filter(None, lines))
            if self._lines:
                return True
        return False

    def _chunk(self, size: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(size)
        except OSError:
            return b""
        self._offset += len(data)
        return data


def parse(line: bytes) -> Record | None:
    """The record in one line, or None where the line is torn, garbage, or of an unknown kind."""
    return _quickly()(line) or _parse_any(line)


@cache
def _quickly() -> Callable[[bytes], Record | None]:
    """What decodes nearly all lines, where it is installed: ranks may have to do without it."""
    try:
        from ddpcheck.records.decoding_msgspec import decode
    except ImportError:
        return lambda line: None
    return decode


def _parse_any(line: bytes) -> Record | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    record = from_mapping(raw)
    if record is None or not _fits(record):
        return None
    return record


def _fits(record: Record) -> bool:
    return all(fits(getattr(record, name)) for name, fits in _fields(record.kind))


@cache
def _fields(kind: str) -> list[tuple[str, Fits]]:
    hints = get_type_hints(KINDS[kind])
    return [(name, _check(hint)) for name, hint in hints.items() if name != "kind"]


def _check(hint: Any) -> Fits:
    """Whether a value, which came out of JSON, is what the schema says. Made once: there are many records."""
    if hint is Any:
        return lambda value: True
    origin, inner = get_origin(hint), [_check(part) for part in get_args(hint)]
    if origin is list:
        (item,) = inner
        return lambda value: type(value) is list and all(map(item, value))
    if origin is dict:
        _, item = inner
        return lambda value: type(value) is dict and all(map(item, value.values()))
    if origin is not None:
        return lambda value: any(choice(value) for choice in inner)
    types = _PLAIN[hint]
    return lambda value: type(value) in types
