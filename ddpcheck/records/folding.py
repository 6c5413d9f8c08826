"""Parts of a rank's file that were folded: what is left of them, and the list of steps that are folded in a run.

    rank-00003.jsonl        the first part: always kept
    rank-00003.part000007   a further part: its last line is a `SummaryRecord` once the next part exists
    rank-00003.folded       for each folded part: its first line, its events, and its last line
    folds.jsonl             the steps that are folded on all ranks

The launcher writes a line of `folds.jsonl` before it folds the first file, and removes a part after what is left of it
has been written. If it is killed in between, some ranks still have parts of these steps: readers take only their
events and summaries, as of folded parts, so that all ranks have the same records of each step. Once what is left is
large, folds are joined in the same way: a line of `folds.jsonl` that covers several folds replaces them, and then the
`folded` file of each rank is written again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.records.registry import FOLDED_SUFFIX, PART_SUFFIX, from_mapping, is_repeated
from ddpcheck.records.summaries import SAMPLE_EVERY, Summary, merged

FOLDS_FILE = "folds.jsonl"
# A longer last line is no summary.
MOST_SUMMARY_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16
# Events of a kind that comes again and again, in folds that were joined.
_MOST_REPEATED = 8
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
    # Of the samples, those of multiples of this are kept.
    samples: int = 1

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
            self._add(fold)
        return new

    def _add(self, fold: Fold) -> None:
        """A fold replaces those that it joins."""
        known = self._folds.setdefault(fold.session, [])
        begin = bisect_left(known, fold.first, key=lambda each: each.first)
        end = bisect_left(known, fold.end, key=lambda each: each.first)
        known[begin:end] = [fold]

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
            samples = raw.get("samples")
            return Fold(session, first, end, agreed, samples if type(samples) is int and samples > 0 else 1)
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


def joined(folds: Sequence[Fold], at_once: int) -> list[Fold]:
    """Each as many consecutive folds as one, with every second sample."""
    runs: list[list[Fold]] = []
    for fold in folds:
        last = runs[-1] if runs else None
        if (
            last is not None
            and len(last) < at_once
            and (last[-1].end, last[-1].agreed) == (fold.first, fold.agreed)
        ):
            last.append(fold)
        else:
            runs.append([fold])
    samples = 2 * max([SAMPLE_EVERY, *(fold.samples for fold in folds)])
    return [Fold(run[0].session, run[0].first, run[-1].end, run[0].agreed, samples) for run in runs]


def join_parts(path: Path, folds: Sequence[Fold]) -> None:
    """Write what is left of the parts of the file `path` again, with one group of lines for each of these folds.

    OSError where it cannot be written: then nothing has changed.
    """
    groups = _groups_of(folded_path(path).read_bytes())
    written: list[bytes] = []
    index = 0
    while index < len(groups):
        fold = _fold_at(folds, groups[index].first)
        end = index + 1
        while end < len(groups) and fold is not None and _fold_at(folds, groups[end].first) is fold:
            end += 1
        written += groups[index].lines if fold is None else _joined_lines(groups[index:end], fold.samples)
        index = end
    other = path.with_suffix(f"{FOLDED_SUFFIX}.new")
    with contextlib.suppress(FileNotFoundError):
        other.unlink()
    try:
        _append(other, b"".join(written))
        other.replace(folded_path(path))
    except OSError:
        with contextlib.suppress(OSError):
            other.unlink()
        raise


def _fold_at(folds: Sequence[Fold], step: int) -> Fold | None:
    index = bisect_right(folds, step, key=lambda fold: fold.first) - 1
    return folds[index] if index >= 0 and step < folds[index].end else None


@dataclass(frozen=True)
class _Group:
    """What is left of a part, or of several."""

    lines: list[bytes]
    summary: dict[str, Any]

    @property
    def first(self) -> int:
        return int(self.summary["first"])


def _groups_of(data: bytes) -> list[_Group]:
    """Complete groups. One that a launcher could not finish is left out: its part still exists."""
    groups = []
    lines: list[bytes] = []
    for line in data.splitlines(keepends=True):
        if _PART.match(line):
            lines = []
        lines.append(line)
        if line.startswith(_SUMMARY) and _PART.match(lines[0]):
            raw = _object_of(line)
            if type(raw.get("first")) is int:
                groups.append(_Group(lines, raw))
            lines = []
    return groups


def _object_of(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _joined_lines(groups: Sequence[_Group], samples: int) -> list[bytes]:
    tables: dict[str, dict[str, Any]] = {}
    samples_kept: list[Mapping[str, Any]] = []
    for group in groups:
        kept, dropped = split_samples(group.summary.get("samples", ()), samples)
        samples_kept += kept
        for raw in (*group.summary.get("folded", ()), *dropped):
            key = json.dumps([raw.get("of"), raw.get("by")], sort_keys=True)
            tables[key] = merged(tables[key], raw) if key in tables else raw
    last = groups[-1].summary
    summary = {
        **last,
        "first": groups[0].first,
        "samples": samples_kept,
        "folded": list(tables.values()),
        "events": [],
    }
    counts: Counter[str] = Counter()
    events = []
    for line in (line for group in groups for line in group.lines[1:-1]):
        kind = str(_object_of(line).get("kind"))
        counts[kind] += 1
        if not is_repeated(kind) or counts[kind] <= _MOST_REPEATED:
            events.append(line)
    return [groups[0].lines[0], *events, json.dumps(summary, separators=(",", ":")).encode() + b"\n"]


def split_samples(
    samples: Sequence[Mapping[str, Any]], every: int
) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    """The samples that are kept where only multiples of `every` are, and the sums of the others."""
    kept = [raw for raw in samples if _is_sample(raw, every)]
    if len(kept) == len(samples):
        return kept, []
    summary = Summary()
    for raw in samples:
        record = None if _is_sample(raw, every) else from_mapping(raw)
        if record is not None:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                summary.add([record])
    return kept, summary.folded()


def _is_sample(raw: Mapping[str, Any], every: int) -> bool:
    """Whether a record that was kept is still kept where only multiples of `every` are."""
    if every == 1:
        return True
    step = raw.get("step", raw.get("forward"))
    if type(step) is not int:
        return False
    lengths = [len(value) for value in raw.values() if type(value) is list]
    steps = raw.get("steps", 1)
    count = max(1, *lengths, steps if type(steps) is int else 1)
    return -(-step // every) * every < step + count


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
