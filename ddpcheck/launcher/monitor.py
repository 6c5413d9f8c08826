"""Monitors a running job through its records: exits, divergence and hangs of the ranks of this node."""

from __future__ import annotations

import contextlib
import time

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.config import Config
from ddpcheck.launcher.hang.detector import HangDetector
from ddpcheck.launcher.live.view import REFRESH_SECONDS, LiveView
from ddpcheck.launcher.process.exit_watch import ExitWatch
from ddpcheck.launcher.process.supervise import StopRequest
from ddpcheck.records.node_log import NodeLog
from ddpcheck.sampling.sampler import Sampler

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
    ) -> None:
        self._run = run
        self._node_log = node_log
        self._fail_fast = config.fail_fast
        self._exits = ExitWatch()
        # The detector requests stacks through the shared-memory file.
        detect = config.exchange_file and config.hang_timeout
        self._hangs = HangDetector(run, node_log, config) if detect else None
        self._known: set[tuple[str, int]] = set()
        self._next_poll = 0.0
        self._last_read = -IDLE_POLL_SECONDS
        self._folder_change: tuple[int, float] = (-1, 0.0)
        self._sampler = sampler
        self._view = view
        # Reading has raised an exception: from then on only exits are logged.
        self.failed = False

    def tick(self) -> StopRequest | None:
        if self._sampler is not None:
            self._sampler.start()
        if not self.failed:
            self._read_records()
        self._log_exits()
        if not self.failed:
            self._update_view()
        if self._fail_fast and any(attempt.diverged() for attempt in self._run.attempts.values()):
            return StopRequest("replicas diverged and --fail-fast is set")
        if self._hangs is not None and not self.failed:
            return self._hangs.tick()
        return None

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
                    self._exits.add(header.pid, number, header.ticks or None)
                    if self._sampler is not None:
                        self._sampler.add_rank(number, header.pid)

    def _log_exits(self) -> None:
        for rank, pid, when in self._exits.poll():
            signal = self._exits.signals.pop(pid, None)
            late = {"found_gone": True} if pid in self._exits.found_gone else {}
            self._node_log.write(
                "rank_exit", rank=rank, pid=pid, host=self._node_log.host, time=when, signal=signal, **late
            )
