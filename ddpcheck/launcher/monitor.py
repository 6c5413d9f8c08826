"""Monitors a running job through its records and processes: exits, divergence and hangs of the ranks of this node."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from pathlib import Path

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import KEEP_SUMMARIES, Config
from ddpcheck.launcher.folding import Folding
from ddpcheck.launcher.hang_detector import HangDetector
from ddpcheck.launcher.live_view import REFRESH_SECONDS, LiveView
from ddpcheck.launcher.metrics_export import MetricsExport
from ddpcheck.launcher.process.namespaces import RankProcessIds
from ddpcheck.launcher.process.process_table import ending_signal, read_process
from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.launcher.rendezvous_watch import RendezvousWatch
from ddpcheck.launcher.unwatched import UnwatchedProcesses
from ddpcheck.records.node_log import NodeLog
from ddpcheck.records.reasons import NoHangWatch, Unwatched
from ddpcheck.sampling.sampler import Sampler

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


# Maximum duration of one read. After a read that is slower than SLOW_POLL_SECONDS, the monitor pauses so that reading
# takes at most MAX_CPU_SHARE of a core. The rest is read after the job has ended.
MAX_POLL_SECONDS, SLOW_POLL_SECONDS = 0.5, 0.05
MAX_CPU_SHARE = 0.5
# Read interval without a live view and without --fail-fast. Reading takes processor time from the job.
IDLE_POLL_SECONDS = 1.0
# After a new file, records are read at every tick for this time: a new rank must be known before it can exit.
NEW_FILE_SECONDS = 2.0


class RunMonitor:
    """The supervisor calls `tick` several times per second."""

    def __init__(
        self,
        run: RunReader,
        node_log: NodeLog,
        config: Config,
        sampler: Sampler | None = None,
        view: LiveView | None = None,
        export: MetricsExport | None = None,
    ) -> None:
        self._run = run
        self._node_log = node_log
        self._fail_fast = config.fail_fast
        self._exits = ExitWatch()
        self._ids = RankProcessIds()
        # By rank and process id: the id that the rank recorded, another one in a container.
        self._recorded_pids: dict[tuple[int, int], int] = {}
        # The detector requests stacks through the shared-memory file.
        detect = config.exchange_file and config.hang_timeout
        self._hangs = HangDetector(run, node_log, config) if detect else None
        self._rendezvous = (
            RendezvousWatch(Path(config.run_dir), node_log.host, node_log, config.hang_timeout)
            if config.hang_timeout
            else None
        )
        if config.hang_timeout and not config.exchange_file:
            node_log.write("no_hang_watch", why=NoHangWatch.NO_MEMORY.value, ranks=[])
        self._known: set[tuple[str, int]] = set()
        self._next_poll = 0.0
        self._last_read = -IDLE_POLL_SECONDS
        self._folder_change: tuple[int, float] = (-1, 0.0)
        self._sampler = sampler
        self._view = view
        self._export = export
        self._unwatched: UnwatchedProcesses | None = UnwatchedProcesses(config.run_dir, self._log_unwatched)
        self._folding = Folding(run) if config.keep == KEEP_SUMMARIES else None
        # Reading has raised an exception: from then on only exits are logged.
        self.failed = False

    def tick(self) -> StopRequest | None:
        if self._sampler is not None:
            self._sampler.start()
        if not self.failed:
            self._read_records()
        self._log_exits()
        self._look_for_unwatched()
        if not self.failed:
            self._update_view()
            self._update_export()
            self._fold()
        if self._fail_fast and any(attempt.diverged() for attempt in self._run.attempts.values()):
            return StopRequest("replicas diverged and --fail-fast is set")
        if self._rendezvous is not None and (request := self._rendezvous.tick()) is not None:
            return request
        if self._hangs is not None and not self.failed:
            return self._hangs.tick()
        return None

    def _look_for_unwatched(self) -> None:
        """Until a rank has reported. After an exception, which the supervisor logs, no more."""
        unwatched, self._unwatched = self._unwatched, None
        if unwatched is not None and not self._known:
            unwatched.tick()
            self._unwatched = unwatched

    def _log_unwatched(self, why: Unwatched, name: str) -> None:
        self._node_log.write("unwatched", why=why.value, name=name)

    def _read_records(self) -> None:
        began = time.monotonic()
        if began < self._next_poll or not self._is_due(began):
            return
        self._last_read = began
        try:
            if self._run.poll(MAX_POLL_SECONDS):
                self._add_new_ranks()
        except Exception:
            # The supervisor logs the exception.
            self.failed = True
            raise
        seconds = time.monotonic() - began
        if seconds > SLOW_POLL_SECONDS:
            self._next_poll = began + seconds / MAX_CPU_SHARE

    def _is_due(self, now: float) -> bool:
        if self._fail_fast or now - self._last_read >= IDLE_POLL_SECONDS:
            return True
        if self._view is not None and now - self._last_read >= REFRESH_SECONDS:
            return True
        # The modification time of a folder changes when files are added, not when files grow.
        with contextlib.suppress(OSError):
            changed = self._run.path.stat().st_mtime_ns
            if changed != self._folder_change[0]:
                self._folder_change = (changed, now)
        return now - self._folder_change[1] < NEW_FILE_SECONDS

    def _update_view(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            # After an exception, which the supervisor logs, the view stays off.
            view.tick()
            self._view = view

    def _update_export(self) -> None:
        export, self._export = self._export, None
        if export is not None:
            # After an exception, which the supervisor logs, nothing is exported any more but the report.
            export.tick(self._run)
            self._export = export

    def _fold(self) -> None:
        folding, self._folding = self._folding, None
        if folding is not None:
            # After an exception, which the supervisor logs, everything is kept.
            folding.tick()
            self._folding = folding

    def close(self) -> None:
        self._log_exits()
        self._exits.close()
        if self._sampler is not None:
            self._sampler.close()

    def _add_new_ranks(self) -> None:
        for attempt in self._run.attempts.values():
            for number, rank in attempt.ranks.items():
                header = rank.header
                if header.host == self._node_log.host and (attempt.session, number) not in self._known:
                    self._known.add((attempt.session, number))
                    if number == 0:
                        # The launcher of rank 0 reports: reading all ranks now shortens the wait at the end.
                        self._run.follow_all()
                        if self._folding is not None:
                            self._folding.follow(attempt.session)
                    pid = self._ids.pid(header)
                    if pid is None:
                        continue
                    self._recorded_pids[number, pid] = header.pid
                    self._exits.add(pid, number, header.ticks or None)
                    if self._sampler is not None:
                        self._sampler.add_rank(number, pid)

    def _log_exits(self) -> None:
        for rank, pid, when in self._exits.poll():
            signal = self._exits.signals.pop(pid, None)
            late = {"found_gone": True} if pid in self._exits.found_gone else {}
            recorded = self._recorded_pids.get((rank, pid), pid)
            self._node_log.write(
                "rank_exit",
                rank=rank,
                pid=recorded,
                host=self._node_log.host,
                time=when,
                signal=signal,
                **late,
            )
