"""Appends a rank's records to its file from a background thread, so that a slow disk does not delay training."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path

from ddpcheck.records.registry import Record, to_line

# Bytes that may be pending while the disk stalls; further records are dropped and counted.
MOST_PENDING = 8 << 20


class RecordWriter:
    """One append-only file with one record per line."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self.path = path
        self.failed = ""
        self.dropped = 0
        self._pending = 0
        self._closed = False
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A daemon thread: the exit of the process never waits for it.
        self._thread = threading.Thread(target=self._drain, name="ddpcheck-writer", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if self.failed or self._closed:
            return
        line = to_line(record)
        with self._lock:
            if self._pending > MOST_PENDING:
                self.dropped += 1
                return
            self._pending += len(line)
        self._queue.put(line)

    def close(self, last: Record, seconds: float = 5.0) -> None:
        """Write `last` after all pending records and close; give up after `seconds`."""
        self._closed = True
        if not self.failed:
            line = to_line(last)
            with self._lock:
                self._pending += len(line)
            self._queue.put(line)
        self._queue.put(None)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._close_file()

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until all pending records are written."""
        deadline = time.monotonic() + seconds
        while self._pending and not self.failed and time.monotonic() < deadline:
            time.sleep(0.001)

    def abandon(self) -> None:
        """In a forked child, leave the file to the parent; the thread does not exist there."""
        self.failed = "forked"
        self._close_file()

    def _close_file(self) -> None:
        """Close once: the descriptor may be reused by the program afterwards."""
        descriptor, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def _drain(self) -> None:
        while True:
            lines, last = self._take()
            if lines and not self.failed:
                self._append(b"".join(lines))
            with self._lock:
                self._pending -= sum(map(len, lines))
            if last:
                return

    def _take(self) -> tuple[list[bytes], bool]:
        """Wait for a line, then take all queued ones: one system call for many records."""
        lines: list[bytes] = []
        line = self._queue.get()
        while line is not None:
            lines.append(line)
            try:
                line = self._queue.get_nowait()
            except queue.Empty:
                return lines, False
        return lines, True

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            # For example a full disk. Complete lines stay readable; readers skip an incomplete last line.
            self.failed = f"{error.strerror} ({self.path})"
