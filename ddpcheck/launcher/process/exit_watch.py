"""Watches the processes of ranks, which are not children of ddpcheck, and records when each one exits."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from ddpcheck.launcher.process.process_table import ending_signal, read_process

_POLL_SECONDS = 0.05


class ExitWatch:
    """Watches processes by id in a separate thread, so that exits are recorded in their order."""

    def __init__(self, *, use_pidfd: bool = True) -> None:
        self._use_pidfd = use_pidfd and hasattr(os, "pidfd_open")
        self._lock = threading.Lock()
        self._known: set[tuple[int, int]] = set()
        self._exits: list[tuple[int, int, float]] = []
        # By pid: the signal that ended it, if it was readable before the parent reaped the process.
        self.signals: dict[int, int] = {}
        # Had exited before they were added: the recorded time is an upper bound.
        self.found_gone: set[int] = set()
        self._by_descriptor: dict[int, tuple[int, int]] = {}
        self._polled: dict[
            tuple[int, int], int
        ] = {}  # (rank, pid) -> start time, for processes without a pidfd
        self._poller = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        self._poller.register(self._wake_read, select.POLLIN)
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, pid: int, rank: int, started: int | None = None) -> bool:
        """Watch a process of this host; False if it has exited already, which `poll` reports with the current time.

        `started` is `process_table.process_start(pid)`, read inside the rank: it distinguishes the rank from a later
        process with the same id.
        """
        with self._lock:
            if self._closed or (rank, pid) in self._known:
                return True
            self._known.add((rank, pid))
            alive = self._watch(pid, rank, started)
            if not alive:
                self._record_signal(pid)
                self.found_gone.add(pid)
                self._exits.append((rank, pid, time.time()))
            elif self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ddpcheck-exit-watch", daemon=True)
                self._thread.start()
            os.write(self._wake_write, b"+")
            return alive

    def poll(self) -> list[tuple[int, int, float]]:
        """The exits since the last call: (rank, pid, unix time), in the order they happened."""
        with self._lock:
            exits, self._exits = self._exits, []
            return exits

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.write(self._wake_write, b"x")
        if self._thread is not None:
            self._thread.join()
        for descriptor in [*self._by_descriptor, self._wake_read, self._wake_write]:
            os.close(descriptor)

    def _watch(self, pid: int, rank: int, started: int | None) -> bool:
        descriptor = self._open(pid)
        # Read after opening: the descriptor keeps referring to the same process.
        process = read_process(pid)
        if process is None or process.is_gone or (started is not None and process.started != started):
            if descriptor is not None:
                os.close(descriptor)
            return False
        if descriptor is None:
            self._polled[(rank, pid)] = process.started
        else:
            self._by_descriptor[descriptor] = (rank, pid)
            self._poller.register(descriptor, select.POLLIN)
        return True

    def _open(self, pid: int) -> int | None:
        if self._use_pidfd:
            with contextlib.suppress(OSError):  # old kernel, seccomp, or exited: use /proc
                return os.pidfd_open(pid)
        return None

    def _run(self) -> None:
        while not self._closed:
            events = self._poller.poll(_POLL_SECONDS * 1000 if self._polled else None)
            now = time.time()
            with self._lock:
                for descriptor, _ in events:
                    if descriptor == self._wake_read:
                        os.read(descriptor, 64)
                    else:
                        self._poller.unregister(descriptor)
                        rank, pid = self._by_descriptor.pop(descriptor)
                        self._record_signal(pid, descriptor)
                        os.close(descriptor)
                        self._exits.append((rank, pid, now))
                self._check_polled(now)

    def _record_signal(self, pid: int, descriptor: int | None = None) -> None:
        number = ending_signal(pid, descriptor)
        if number is not None:
            self.signals[pid] = number

    def _check_polled(self, now: float) -> None:
        for (rank, pid), started in list(self._polled.items()):
            process = read_process(pid)
            if process is None or process.is_gone or process.started != started:
                del self._polled[(rank, pid)]
                self._record_signal(pid)
                self._exits.append((rank, pid, now))
