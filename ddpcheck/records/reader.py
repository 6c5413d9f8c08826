"""Reads record files as they grow; whatever cannot be understood is counted and passed over."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ddpcheck.records.schema import KINDS, Record, from_mapping

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
        self._lines: list[bytes] = []

    def read(self, most: int = 512) -> list[Record]:
        """Up to `most` further lines; none at the present end of the file. A torn last line is left."""
        records: list[Record] = []
        while not records:
            if not self._lines and not self._fill():
                break
            taken, self._lines = self._lines[:most], self._lines[most:]
            for line in taken:
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

    def _fill(self) -> bool:
        """Read on to the end of at least one line; False where the file has none, for now."""
        while data := self._chunk():
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines and self._overlong:
                # The end of what was given up before; it has been counted.
                self._overlong = False
                lines = lines[1:]
            if len(self._rest) > LONGEST_LINE or self._overlong:
                self.bad += not self._overlong
                self._rest, self._overlong = b"", True
            self._lines = [line for line in lines if line]
            if self._lines:
                return True
        return False

    def _chunk(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(CHUNK)
        except OSError:
            return b""
        self._offset += len(data)
        return data


def parse(line: bytes) -> Record | None:
    """The record in one line, or None where the line is torn, garbage, or of an unknown kind."""
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
    return all(_is(getattr(record, name), hint) for name, hint in _hints(record.kind))


@cache
def _hints(kind: str) -> list[tuple[str, Any]]:
    hints = get_type_hints(KINDS[kind])
    return [(name, hint) for name, hint in hints.items() if name != "kind"]


def _is(value: Any, hint: Any) -> bool:
    """Whether `value`, which came out of JSON, is what the schema says."""
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    origin = get_origin(hint)
    if origin is list:
        return isinstance(value, list) and all(_is(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        key_hint, value_hint = get_args(hint)
        return isinstance(value, dict) and all(
            _is(k, key_hint) and _is(v, value_hint) for k, v in value.items()
        )
    if origin is not None:
        return any(_is(value, choice) for choice in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
