"""Appends a rank's records to its file from a background thread, so that a slow disk does not delay training."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ddpcheck.agent.record_parts import RecordParts
from ddpcheck.records.blocks import BlockBuilder
from ddpcheck.records.kinds.rank import FaultRecord
from ddpcheck.records.registry import RECENT_SUFFIX, Record, recent_header, to_line
from ddpcheck.wakeup import Wakeup

# Records that may be pending while the disk stalls; further ones are dropped and counted.
MAX_PENDING = 4096
# The first line after a pause is written at once, those that follow it after this time.
INTERVAL_SECONDS = 0.2
# Records of steps are collected for so long, or until they are so many or so large, and are written as one block. Until
# then they are in a second file, so that a rank that crashes loses none of them.
BLOCK_SECONDS = 2.0
BLOCK_RECORDS = 512
# Fewer of them wait for twice as long, and are then written as lines: reading a small block takes longer.
FEWEST_RECORDS = 24
BLOCK_BYTES = 1 << 20


class RecordWriter:
    """One append-only file of records. They are encoded by the thread that writes them.

    `block_seconds`: how long records of steps may be collected; short where somebody reads along. `bounded`: a long
    file is continued in parts, which the launcher folds.
    """

    def __init__(self, path: Path, block_seconds: float = BLOCK_SECONDS, bounded: bool = False) -> None:
        self._parts = RecordParts(path, bounded)
        self.path = path
        self.failed = ""
        self.dropped = 0
        self._closed = False
        self._pending: deque[Record | Callable[[], Record]] = deque()
        self._writing = False
        self._block = BlockBuilder()
        # Those of its records that the file of recent records does not have yet.
        self._unsaved: list[Record] = []
        self._recent = _RecentFile(path.with_suffix(RECENT_SUFFIX))
        self._block_seconds = block_seconds
        # When the first record of the block was collected.
        self._block_began = 0.0
        self._wake = Wakeup()
        # Set while somebody waits for the records to be written.
        self._urgent = Wakeup()
        # A daemon thread: the exit of the process never waits for it.
        self._thread = threading.Thread(target=self._run, name="ddpcheck-writer", daemon=True)
        self._thread.start()

    def write(self, record: Record | Callable[[], Record]) -> None:
        if self.failed or self._closed:
            return
        if len(self._pending) >= MAX_PENDING:
            self.dropped += 1
            return
        self._pending.append(record)
        if not self._wake.is_set():
            self._wake.set()

    def write_later(self, make: Callable[[], Record]) -> None:
        """Write what `make` returns. The writer's thread calls it, so its arguments must not change any more."""
        # What a record is made from takes more memory than the record. It is not kept while the disk stalls.
        self.write(make() if self._writing else make)

    def close(self, last: Record, seconds: float = 5.0) -> None:
        """Write `last` after all pending records and close; give up after `seconds`."""
        self._pending.append(last)
        self._closed = True
        self._urgent.set()
        self._wake.set()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._parts.close()
            if not self.failed:
                self._recent.remove()

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until all pending records are written."""
        deadline = time.monotonic() + seconds
        self._urgent.set()
        self._wake.set()
        while (
            (self._pending or self._writing or len(self._block))
            and not self.failed
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        self._urgent.clear()

    def abandon(self) -> None:
        """In a forked child, leave the file to the parent; the thread does not exist there."""
        self.failed = "forked"
        self._parts.close()
        self._recent.abandon()

    def _run(self) -> None:
        while not self._closed or self._pending or len(self._block):
            self._wake.wait(self._block_due() if len(self._block) else None)
            self._wake.clear()
            self._write_pending()
            # A fast job gets one system call for many records, and its threads rarely wait for this one.
            self._urgent.wait(INTERVAL_SECONDS)

    def _write_pending(self) -> None:
        self._writing = True
        while self._pending:
            record = _made(self._pending.popleft())
            first = self._parts.begins_part(record)
            if first is not None:
                self._end_block()
                self._parts.begin_part(first)
            if not self._add_to_block(record):
                # A file is in the order of events.
                self._end_block()
                if not self._add_to_block(record):
                    self._parts.add_event(_line_of(record))
            if len(self._block) >= BLOCK_RECORDS or self._block.size >= BLOCK_BYTES:
                self._end_block()
        if len(self._block) and (self._urgent.is_set() or self._block_due() <= 0):
            self._end_block()
        if self._parts.flush() and not self._parts.failed:
            # Whatever it had is in this file now.
            self._recent.clear()
        self.failed = self.failed or self._parts.failed
        if self._unsaved and not self.failed:
            lines = b"".join(map(_line_of, self._unsaved))
            self._recent.append(self._parts.number, self._parts.size, lines)
            self._unsaved = []
        self._writing = False

    def _block_due(self) -> float:
        """Seconds until the block has to be written."""
        seconds = self._block_seconds * (2 if len(self._block) < FEWEST_RECORDS else 1)
        return max(0.0, self._block_began + seconds - time.monotonic())

    def _add_to_block(self, record: Record) -> bool:
        try:
            added = self._block.add(record)
        except Exception:
            # Its fields have wrong types: as a line it is at least reported.
            return False
        if added:
            self._parts.note(record)
            self._unsaved.append(record)
            if len(self._block) == 1:
                self._block_began = time.monotonic()
        return added

    def _end_block(self) -> None:
        """Write the collected records, and forget them."""
        block, self._block, self._unsaved = self._block, BlockBuilder(), []
        if not len(block):
            return
        self._parts.sum_up(block.tables())
        if len(block) >= FEWEST_RECORDS:
            try:
                self._parts.add_line(block.line())
                return
            except Exception:
                # One of them cannot be encoded, and is reported.
                pass
        for record in block.records:
            self._parts.add_line(_line_of(record))


class _RecentFile:
    """The records of the block that is being collected, for readers of a rank that has crashed.

    Its first line states the size of the rank's file when it was begun: if that has grown since, it contains these
    records. Errors are ignored: without this file, a crash loses the records of the last two seconds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._empty = True
        self._failed = False

    def append(self, part: int, size: int, lines: bytes) -> None:
        if self._failed:
            return
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            os.write(self._fd, recent_header(size, part) + lines if self._empty else lines)
            self._empty = False
        except OSError:
            self._failed = True

    def clear(self) -> None:
        if self._empty or self._failed:
            return
        try:
            os.ftruncate(self._fd, 0)
            self._empty = True
        except OSError:
            self._failed = True

    def remove(self) -> None:
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            with contextlib.suppress(OSError):
                self._path.unlink()

    def abandon(self) -> None:
        descriptor, self._fd, self._failed = self._fd, -1, True
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _made(record: Record | Callable[[], Record]) -> Record:
    """The record; a report of the fault if it cannot be made."""
    if isinstance(record, Record):
        return record
    try:
        return record()
    except Exception as error:
        return _fault(getattr(record, "__qualname__", "record"), error)


def _line_of(record: Record) -> bytes:
    """The line of `record`; one that cannot be encoded is replaced by a report of that fault."""
    try:
        return to_line(record)
    except Exception as error:
        # This thread must go on: without it no record is written any more.
        return to_line(_fault(record.kind, error))


def _fault(entry: str, error: Exception) -> FaultRecord:
    return FaultRecord("writer", entry, f"{type(error).__name__}: {error}"[:500], "", os.getpid())
