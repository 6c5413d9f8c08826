"""Reads a run folder: file names, run.json, and record files while they grow. Undecodable lines are counted."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from ddpcheck.errors import RecordsFolded
from ddpcheck.records.blocks import Block, BlockError, decode, is_block
from ddpcheck.records.folding import Fold, FoldedParts, FoldList, part_path, remainder_of, split_samples
from ddpcheck.records.kinds.folds import FoldedRecord, PartRecord, SummaryRecord
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.registry import (
    PART_SUFFIX,
    RANK_FILES,
    RECENT_SUFFIX,
    Record,
    from_mapping,
    record_kinds,
    size_before,
)

# Where `ddpcheck run` creates run folders by default.
RUNS_FOLDER = "ddpcheck-runs"
RUN_FILE = "run.json"
REPORT_FILE = "report.json"


def is_run_folder(path: Path) -> bool:
    """Whether the folder contains run.json or records of at least one rank."""
    return path.is_dir() and ((path / RUN_FILE).exists() or any(path.glob(RANK_FILES)))


def read_run_file(path: Path) -> dict[str, Any]:
    """run.json of the run folder `path`; empty if the file is missing or damaged."""
    try:
        record = json.loads((path / RUN_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


TypeCheck = Callable[[Any], bool]
# The Python types that JSON gives for each annotation. An int is accepted as a float, a bool never as a number.
_JSON_TYPES: dict[Any, set[type]] = {
    int: {int},
    float: {int, float},
    str: {str},
    bool: {bool},
    type(None): {type(None)},
}

# Larger than any record: a longer line is damaged, and is dropped instead of buffered.
LONGEST_LINE = 64 << 20
CHUNK = 1 << 20
# Of the first line of a part.
_LONGEST_BEGINNING = 1 << 10
# The beginning of every line that a rank writes.
_KIND = re.compile(rb'\{"kind":"(\w+)"')


class RecordFile:
    """The record file of one rank with its parts. It can be read while the rank still writes.

    `folds`: the steps that are folded in the run: of parts that still have them, only events and summaries are read.
    """

    def __init__(self, path: Path, folds: FoldList | None = None) -> None:
        self.path = path
        self.bad = 0
        # The part that is read, or is to be read next, and its first step.
        self.part = 0
        self.first = 0
        # The part has not been opened yet.
        self.entering = False
        # Of the folds; that of the header if it is not set.
        self.session = ""
        self._folds = folds
        self._folded = FoldedParts(path)
        self._offset = 0
        # Bytes of the parts before.
        self._before = 0
        self._rest = b""
        self._overlong = False
        self._lines: deque[bytes] = deque()
        self._ready: list[Record] = []

    def read(self, most: int = 512, chunk: int | None = None) -> list[Record]:
        """The next records; an empty list at the current end of the file.

        At most `most` records, and those of one block or of one folded part. An incomplete last line is not read.
        `chunk`: bytes to read at a time, where many files are read in turns.
        """
        records: list[Record] = []
        for item in self.read_items(most, chunk):
            if isinstance(item, Block):
                records += item.records()
            else:
                records.append(item)
        return records

    def read_items(self, most: int = 512, chunk: int | None = None) -> list[Record | Block]:
        """The same; blocks are not taken apart."""
        items: list[Record | Block] = []
        rows = 0
        while not items:
            if not self._lines and not self._fill(chunk or CHUNK):
                break
            if self._ready:
                items += self._ready
                self._ready = []
                break
            while self._lines and rows < most:
                line = self._lines.popleft()
                item = _parse_block(line) if is_block(line) else parse(line)
                rows += item.rows if isinstance(item, Block) else 1
                if isinstance(item, Block):
                    self.bad += item.skipped
                if item is None:
                    self.bad += 1
                elif isinstance(item, PartRecord):
                    continue
                else:
                    items.append(item)
                if isinstance(item, RankHeader) and not self.session:
                    self.session = item.session
                if isinstance(item, SummaryRecord):
                    self._end_part(self.part, item.end)
                    break
            rows = 0
        return items

    def _end_part(self, part: int, end: int) -> None:
        """The next part follows."""
        self.part, self.first, self.entering = part + 1, end, True
        self._before += self._offset
        self._offset, self._rest = 0, b""
        self._lines.clear()

    def _enter(self) -> bool:
        """Open the next part, or read what is left of it; False where it is not there yet."""
        path = part_path(self.path, self.part)
        try:
            with path.open("rb") as file:
                line = file.readline(_LONGEST_BEGINNING)
        except OSError:
            line = None
        fold = self._fold()
        if line is not None and fold is None:
            self.entering = not line.endswith(b"\n")
            return not self.entering
        lines = remainder_of(path) if line is not None else None
        lines = lines or self._folded.lines(self.part)
        if lines is None:
            # Without what is left of it, the part itself is read.
            self.entering = line is None or not line.endswith(b"\n")
            return not self.entering
        self._take_folded(lines, fold)
        return True

    def _fold(self) -> Fold | None:
        if self._folds is None or not self.session:
            return None
        return self._folds.at(self.session, self.first)

    def _take_folded(self, lines: list[bytes], fold: Fold | None) -> None:
        """The records of a folded part, or of several: sums, samples, and events."""
        events: list[Record] = []
        last: tuple[int, int] | None = None
        for line in lines:
            record = parse(line)
            if record is None:
                self.bad += 1
            elif isinstance(record, SummaryRecord):
                last = max(self.part, record.part), record.end
                added = {
                    "kind": FoldedRecord.kind,
                    "part": record.first,
                    "fold": record.first if fold is None else fold.first,
                    "agreed": fold is not None and fold.agreed,
                }
                kept, sums = split_samples(record.samples, 1 if fold is None else fold.samples)
                for raw in (*record.folded, *sums):
                    folded = _record_of({**raw, **added})
                    if folded is not None:
                        self._ready.append(folded)
                    self.bad += folded is None
                samples = [_record_of(raw) for raw in kept]
                self._ready += [sample for sample in samples if sample is not None]
            elif not isinstance(record, PartRecord):
                events.append(record)
        self._ready += events
        self._before += sum(map(len, lines))
        if last is None:
            # Its summary is damaged: nothing after it can be assigned to a step.
            last = self.part, self.first
        self._end_part(*last)

    def all(self) -> Iterator[Record]:
        """All records of a rank that writes no more; the file is read in chunks."""
        while (records := self.read()) or self.skip_lost():
            yield from records
        yield from self.recent()

    def skip_lost(self) -> bool:
        """Go on with the next part of a rank that writes no more, where the one to be read is gone."""
        if not self.entering or part_path(self.path, self.part).exists():
            return False
        name = f"{self.path.name.removesuffix('.jsonl')}{PART_SUFFIX}"
        numbers = [each.name.removeprefix(name) for each in self.path.parent.glob(f"{name}*")]
        later = [int(number) for number in numbers if number.isdecimal() and int(number) > self.part]
        if not later:
            return False
        self.bad += 1
        self.part = min(later)
        return True

    def recent(self) -> list[Record]:
        """Once all else was read: records that the rank had collected for its next block when it crashed."""
        try:
            first, _, rest = self.path.with_suffix(RECENT_SUFFIX).read_bytes().partition(b"\n")
        except OSError:
            return []
        # If the file has grown since, it contains these records.
        if size_before(first) != (self.part, self._offset - len(self._rest)):
            return []
        records = []
        for line in rest.split(b"\n")[:-1]:
            record = parse(line)
            if record is None:
                self.bad += 1
            else:
                records.append(record)
        return records

    @property
    def bytes_read(self) -> int:
        return self._before + self._offset

    @property
    def torn(self) -> bool:
        """Whether the file currently ends in the middle of a line."""
        return bool(self._rest)

    def _fill(self, chunk: int) -> bool:
        """Read at least one complete line, or a folded part; False where the file has none at the moment."""
        while self.entering and not self._ready:
            if not self._enter():
                return False
        if self._ready:
            return True
        while data := self._chunk(chunk):
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines and self._overlong:
                # The rest of an overlong line that is already counted.
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
            with part_path(self.path, self.part).open("rb") as file:
                file.seek(self._offset)
                data = file.read(size)
        except FileNotFoundError:
            if self.part:
                raise RecordsFolded(
                    f"{self.path}: steps were folded while they were read; read it again"
                ) from None
            return b""
        except OSError:
            return b""
        self._offset += len(data)
        return data


def _parse_block(line: bytes) -> Block | None:
    try:
        return decode(line, _is_valid_field)
    except BlockError:
        return None


def parse(line: bytes) -> Record | None:
    """The record in one line of JSON, or None where the line is incomplete, damaged, or of an unknown kind."""
    record = _fast_decoder()(line) or _parse_any(line)
    return record if record is not None and record.is_possible() else None


@cache
def _fast_decoder() -> Callable[[bytes], Record | None]:
    """Decodes nearly all lines, if msgspec is installed: the environment of a rank may lack it."""
    try:
        import msgspec
    except ImportError:
        return lambda line: None
    decoders = {kind.encode(): msgspec.json.Decoder(cls) for kind, cls in record_kinds().items()}

    def decode(line: bytes) -> Record | None:
        """None for a line that this fast path does not understand: it is damaged, or only formatted differently."""
        match = _KIND.match(line)
        decoder = decoders.get(match[1]) if match else None
        if decoder is None:
            return None
        try:
            return decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None

    return decode


def _parse_any(line: bytes) -> Record | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    return _record_of(raw)


def _record_of(raw: Any) -> Record | None:
    """The record with these fields; None where they are no valid record."""
    record = from_mapping(raw) if isinstance(raw, dict) else None
    if record is None or not _has_valid_types(record) or not record.is_possible():
        return None
    return record


def _has_valid_types(record: Record) -> bool:
    return all(is_valid(getattr(record, name)) for name, is_valid in _type_checks(record.kind).items())


def _is_valid_field(kind: str, name: str, value: Any) -> bool:
    return _type_checks(kind)[name](value)


@cache
def _type_checks(kind: str) -> dict[str, TypeCheck]:
    hints = get_type_hints(record_kinds()[kind])
    # Class variables are no fields.
    return {
        name: _type_check(hint)
        for name, hint in hints.items()
        if name != "kind" and get_origin(hint) is not ClassVar
    }


def _type_check(hint: Any) -> TypeCheck:
    """A function that tests whether a value decoded from JSON has the annotated type."""
    if hint is Any:
        return lambda value: True
    origin, inner = get_origin(hint), [_type_check(part) for part in get_args(hint)]
    if origin is list:
        (item,) = inner
        types = _JSON_TYPES.get(get_args(hint)[0])
        if types is not None:
            allowed: set[type] = types
            return lambda value: type(value) is list and allowed.issuperset(map(type, value))
        return lambda value: type(value) is list and all(map(item, value))
    if origin is dict:
        _, item = inner
        return lambda value: type(value) is dict and all(map(item, value.values()))
    if origin is not None:
        return lambda value: any(choice(value) for choice in inner)
    types = _JSON_TYPES[hint]
    return lambda value: type(value) in types
