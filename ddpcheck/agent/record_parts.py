"""The file of a rank and the parts that continue it, each with a summary of its steps at its end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddpcheck.records.folding import part_path
from ddpcheck.records.kinds.folds import PartRecord, SummaryRecord
from ddpcheck.records.registry import Record, block_table, to_line
from ddpcheck.records.summaries import SAMPLE_EVERY, Positions, Summary, contains_multiple, step_of

# A part ends at the next multiple of a power of two of steps once it is as large. The power of two is the smallest one
# whose steps fill a part, so that parts of ranks that write about as much end at the same steps.
PART_BYTES = 768 << 10
_FEWEST_STEPS = 8


class RecordParts:
    """Appends lines. The caller says which records they contain, and begins new parts.

    `bounded`: whether there are further parts at all.
    """

    def __init__(self, path: Path, bounded: bool) -> None:
        self.path = path
        self.number = 0
        # Bytes of the current part, written or in the buffer.
        self.size = 0
        self.failed = ""
        self._fd = _created(path)
        self._bounded = bounded
        self._first = 0
        # The highest step of all records so far.
        self._step = -1
        self._buffer: list[bytes] = []
        self._events: list[list[int]] = []
        self._positions = Positions()
        # None: of the first part, which is always kept, and where a record could not be summed up.
        self._summary: Summary | None = None

    def add_event(self, line: bytes) -> None:
        """A line that is kept when the part is folded."""
        last = self._events[-1] if self._events else None
        if last is not None and sum(last) == self.size:
            last[1] += len(line)
        else:
            self._events.append([self.size, len(line)])
        self.add_line(line)

    def add_line(self, line: bytes) -> None:
        self._buffer.append(line)
        self.size += len(line)

    def begins_part(self, record: Record) -> int | None:
        """The first step of the next part if the record is the first one in it."""
        step = self._step_of(record)
        if not self._bounded or step is None or step <= self._step:
            return None
        before, self._step = self._step, step
        if before < 0 or self.size < PART_BYTES or step // _FEWEST_STEPS == before // _FEWEST_STEPS:
            return None
        steps = _FEWEST_STEPS
        while steps * self.size < PART_BYTES * (step - self._first):
            steps *= 2
        return step // steps * steps if step // steps != before // steps else None

    @staticmethod
    def _step_of(record: Record) -> int | None:
        table = block_table(type(record))
        # Ranks write the others at moments of their own.
        return None if table is None or table.of_one_rank else step_of(record)

    def note(self, record: Record) -> None:
        """A record of a step was collected for a block."""
        if self._summary is None:
            return
        is_compared = self._step_of(record) is not None
        if self._step % SAMPLE_EVERY == 0 if is_compared else contains_multiple(record, SAMPLE_EVERY):
            self._summary.sample(record)

    def sum_up(self, tables: Iterable[Sequence[Record]]) -> None:
        """The records of a block."""
        if not self._bounded:
            return
        for rows in tables:
            self._positions.add(rows)
            if self._summary is not None:
                try:
                    self._summary.add(rows)
                except Exception:
                    # A record with fields of other types: this part is kept.
                    self._summary = None
        if self._summary is not None:
            self._summary.forget_samples()

    def flush(self) -> bool:
        """Pass all lines to the system; whether there were any."""
        data, self._buffer = b"".join(self._buffer), []
        if not data or self.failed:
            return False
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            # For example a full disk. Complete lines stay readable; readers skip an incomplete last line.
            self.failed = f"{error.strerror} ({part_path(self.path, self.number)})"
        return True

    def begin_part(self, first: int) -> None:
        """End this part and begin the next one; without an effect where there can be no further file."""
        try:
            descriptor = _created(part_path(self.path, self.number + 1))
        except OSError:
            return
        summary = self._summary
        self.add_line(
            to_line(
                SummaryRecord(
                    self.number,
                    self._first,
                    first,
                    self._positions.digest() if summary is not None or not self.number else "",
                    summary.samples if summary is not None else [],
                    summary.folded() if summary is not None else [],
                    self._events,
                )
            )
        )
        self.flush()
        if self.failed:
            os.close(descriptor)
            return
        os.close(self._fd)
        self._fd = descriptor
        self.number += 1
        self._first = first
        self.size = 0
        self._events = []
        self._summary = Summary()
        self.add_line(to_line(PartRecord(self.number, first)))
        self.flush()

    def close(self) -> None:
        """Close once: the descriptor may be reused by the program afterwards."""
        descriptor, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _created(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
