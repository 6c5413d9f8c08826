"""Follows the records of a run while it is under way: who vanished, whether ranks part, whether they hang."""

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

# Reading may take so long at a time, and, where it takes long at all, so much of a core; what is left is read when the
# job is over.
MOST_SECONDS, LONG_SECONDS = 0.5, 0.05
MOST_OF_A_CORE = 0.5
# How often the records are read where nobody looks on and a disagreement stops nothing. The job's own processors do it.
QUIET_SECONDS = 1.0
# And for how long they are read at every turn once a file has come: a new rank is to be met before it can vanish.
ALERT_SECONDS = 2.0


class RunMonitor:
    """Called a few times a second by the supervisor."""

    def __init__(
        self,
        run: RunReader,
        node_log: NodeLog,
        config: Config,
        sampler: Sampler | None = None,
        show: LiveView | None = None,
    ) -> None:
        self._run = run
        self._node_log = node_log
        self._fail_fast = config.fail_fast
        self._exits = ExitWatch()
        # Ranks are asked through the board.
        watched = config.board and config.hang_timeout
        self._hangs = HangDetector(run, node_log, config) if watched else None
        self._known: set[tuple[str, int]] = set()
        self._next_poll = 0.0
        self._read_at = -QUIET_SECONDS
        self._folder_changed: tuple[int, float] = (-1, 0.0)
        self._sampler = sampler
        self._show = show
        self.stumbled = False

    def tick(self) -> StopRequest | None:
        if self._sampler is not None:
            self._sampler.start()
        if not self.stumbled:
            self._follow()
        self._note_exits()
        if not self.stumbled:
            self._show_state()
        if self._fail_fast and any(attempt.diverged() for attempt in self._run.attempts.values()):
            return StopRequest("ranks disagree and --fail-fast was given")
        if self._hangs is not None and not self.stumbled:
            return self._hangs.tick()
        return None

    def _follow(self) -> None:
        began = time.monotonic()
        if began < self._next_poll or not self._is_due(began):
            return
        self._read_at = began
        try:
            if self._run.poll(MOST_SECONDS):
                self._meet_new_ranks()
        except Exception:
            # The supervisor writes it down; from here on only exits are noted.
            self.stumbled = True
            raise
        took = time.monotonic() - began
        if took > LONG_SECONDS:
            self._next_poll = began + took / MOST_OF_A_CORE

    def _is_due(self, now: float) -> bool:
        if self._fail_fast or now - self._read_at >= QUIET_SECONDS:
            return True
        if self._show is not None and now - self._read_at >= REFRESH_SECONDS:
            return True
        # A folder changes when a file comes into it, not with what is written to the file. One that is gone does not.
        with contextlib.suppress(OSError):
            changed = self._run.path.stat().st_mtime_ns
            if changed != self._folder_changed[0]:
                self._folder_changed = (changed, now)
        return now - self._folder_changed[1] < ALERT_SECONDS

    def _show_state(self) -> None:
        show, self._show = self._show, None
        if show is not None:
            # What raises is written down by the supervisor, and not shown again.
            show.tick()
            self._show = show

    def close(self) -> None:
        self._note_exits()
        self._exits.close()
        if self._sampler is not None:
            self._sampler.close()

    def _meet_new_ranks(self) -> None:
        for attempt in self._run.attempts.values():
            for number, rank in attempt.ranks.items():
                header = rank.header
                if header.host == self._node_log.host and (attempt.session, number) not in self._known:
                    self._known.add((attempt.session, number))
                    if number == 0:
                        # The launcher that has rank 0 reports: what it has read by the end, nobody waits for then.
                        self._run.follow_all()
                    self._exits.add(header.pid, number, header.ticks or None)
                    if self._sampler is not None:
                        self._sampler.meet(number, header.pid)

    def _note_exits(self) -> None:
        for rank, pid, when in self._exits.poll():
            signal = self._exits.signals.pop(pid, None)
            late = {"found_gone": True} if pid in self._exits.found_gone else {}
            self._node_log.write(
                "rank_exit", rank=rank, pid=pid, host=self._node_log.host, time=when, signal=signal, **late
            )
