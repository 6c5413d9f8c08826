"""Parts of a rank's file that were folded: what is left of them, and the list of steps that are folded in a run.

    rank-00003.jsonl        the first part: always kept
    rank-00003.part000007   a further part: its last line is a `SummaryRecord` once the next part exists
    rank-00003.folded       for each folded part: its first line, its events, and its last line
    folds.jsonl             the steps that are folded on all ranks

The launcher writes a line of `folds.jsonl` before it folds the first file, and removes a part after what is left of it
has been written. If it is killed in between, some ranks still have parts of these steps: readers take only their
events and summaries, as of folded parts, so that all ranks have the same records of each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.records.registry import FOLDED_SUFFIX, PART_SUFFIX

FOLDS_FILE = "folds.jsonl"
# A longer last line is no summary.
MOST_SUMMARY_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16
_SUMMARY = b'{"kind":"summary"'
_PART = re.compile(rb'\{"kind":"part","part":(\d{1,9}),')


def part_path(path: Path, number: int) -> Path:
    """A part of the file `path` of a rank."""
    return path.with_suffix(f"{PART_SUFFIX}{number:06d}") if number else path


def folded_path(path: Path) -> Path:
    return path.with_suffix(FOLDED_SUFFIX)


def further_files(path: Path) -> list[Path]:
    """The parts of the file of a rank, and what is left of folded ones."""
    name = path.name.removesuffix(".jsonl")
    parts = sorted(path.parent.glob(f"{name}{PART_SUFFIX}[0-9]*"))
    return [*parts, *([folded_path(path)] if folded_path(path).exists() else [])]


@dataclass(frozen=True)
class Fold:
    """Steps that are folded on all ranks of an attempt."""

    session: str
    first: int
    # The step after the last one.
    end: int
    # Whether all ranks agreed at all of these steps.
    agreed: bool

    def line(self) -> bytes:
        return json.dumps(vars(self), separators=(",", ":")).encode() + b"\n"


class FoldList:
    """The contents of `folds.jsonl`, read again when it has grown."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDS_FILE
        self._size = 0
        self._folds: dict[str, list[Fold]] = {}

    def refresh(self) -> list[Fold]:
        """Read again; the folds that are new."""
        try:
            if self._path.stat().st_size == self._size:
                return []
            data = self._path.read_bytes()
        except OSError:
            return []
        complete = data[self._size : data.rfind(b"\n") + 1]
        self._size += len(complete)
        new = [fold for fold in map(_fold_of, complete.splitlines()) if fold is not None]
        for fold in new:
            insort(self._folds.setdefault(fold.session, []), fold, key=lambda each: each.first)
        return new

    def of(self, session: str) -> Sequence[Fold]:
        return self._folds.get(session, ())

    def at(self, session: str, step: int) -> Fold | None:
        """The fold that contains a step."""
        folds = self.of(session)
        index = bisect_right(folds, step, key=lambda fold: fold.first) - 1
        return folds[index] if index >= 0 and step < folds[index].end else None


def _fold_of(line: bytes) -> Fold | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match raw:
        case {"session": str(session), "first": int(first), "end": int(end), "agreed": bool(agreed)}:
            return Fold(session, first, end, agreed)
    return None


def add_fold(folder: Path, fold: Fold) -> None:
    """OSError where it cannot be written; then nothing may be folded."""
    _append(folder / FOLDS_FILE, fold.line())


def remainder_of(part: Path) -> list[bytes] | None:
    """First line, events and last line of a part; None where it is not complete."""
    try:
        with part.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            tail = _tail(file, size)
            file.seek(0)
            first = file.readline(_TAIL_BYTES)
            if tail is None or not _PART.match(first):
                return None
            raw: Any = json.loads(tail)
            events = [_read(file, *extent) for extent in raw.get("events", ())]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return [first, *events, tail]


def _tail(file: Any, size: int) -> bytes | None:
    """The last line, if it is a summary."""
    length = _TAIL_BYTES
    while True:
        begin = max(0, size - length)
        file.seek(begin)
        data: bytes = file.read(size - begin)
        if not data.endswith(b"\n"):
            return None
        cut = data.rfind(b"\n", 0, -1)
        if cut >= 0 or not begin:
            line = data[cut + 1 :]
            return line if line.startswith(_SUMMARY) else None
        if length >= MOST_SUMMARY_BYTES:
            return None
        length *= 4


def _read(file: Any, offset: int, size: int) -> bytes:
    if offset < 0 or not 0 < size <= MOST_SUMMARY_BYTES:
        raise ValueError("an event outside of the part")
    file.seek(offset)
    data: bytes = file.read(size)
    if len(data) != size or not data.endswith(b"\n"):
        raise ValueError("an incomplete event")
    return data


def fold_part(path: Path, number: int) -> bool:
    """Replace a part of the file `path` by what is left of it; False where the part is not complete, or gone.

    OSError where that cannot be written: the part is kept.
    """
    part = part_path(path, number)
    lines = remainder_of(part)
    if lines is None:
        return False
    _append(folded_path(path), b"".join(lines))
    part.unlink()
    return True


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            # Somebody was killed while it wrote this line.
            data = b"\n" + data
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


class FoldedParts:
    """Reads what is left of the folded parts of one rank, in order."""

    def __init__(self, path: Path) -> None:
        self._path = folded_path(path)
        self._offset = 0
        self._inode = 0

    def lines(self, number: int) -> list[bytes] | None:
        """Those of a part, or of several parts that begin with it; None where there are none."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                return self._find(file, number)
        except OSError:
            return None

    def _find(self, file: Any, number: int) -> list[bytes] | None:
        lines: list[bytes] = []
        while (line := file.readline()).endswith(b"\n"):
            match = _PART.match(line)
            if match is not None:
                if int(match[1]) > number:
                    return None
                # What was written before is not complete.
                lines = []
            lines.append(line)
            if line.startswith(_SUMMARY):
                if (begin := _PART.match(lines[0])) is not None and int(begin[1]) == number:
                    self._offset = file.tell()
                    return lines
                lines = []
        return None
